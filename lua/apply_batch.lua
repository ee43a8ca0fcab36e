-- apply_batch(fence, engine*, block*, record; publisher, token, watermark, ts, newest_ts, digest, before, holders, events, run*) -> {verdict, blocks}
--
-- Apply folded batches of one stream to the blocks of one shard, exactly once and in order.
--
-- KEYS  fence      hash    `<publisher>`: the highest lease token seen here; `holder`: the highest holder id;
--                          `seq:<publisher>`, where there is no record: of the last batch that has blocks here
--       engine*    hash    one per holder in the call: engine hash to seq_hash, `*<block>` copies and `*` how many
--                          such fields there are, `applied`
--       block*     string  one per block of every run, in the order of the runs: ascending holder ids
--       record     hash    the publisher's record; only on the shard that has it (shard 0), else absent
-- ARGV  publisher  its integer id
--       token      the lease token the caller believes is the highest
--       watermark  seq to move the watermark to when all is done; '' where another call does that
--       ts, newest_ts, digest   of that batch, kept beside the watermark
--       before     the watermark that the caller has seen acknowledged, '' for none. A record that has less is that of
--                  a Redis that has lost its last writes: what comes next would hide what is missing. Without a
--                  record, the same of `seq:<publisher>`, where -1 is none of this life
--       holders    how many engine* there are; then for each: holder id, mode
--                    count  copies are counted; a removal takes one copy
--                    set    a block is there or not
--                    all    counts are not trusted any more: a removal takes the block, whatever its count
--       events     how many event_ids move with this call; then for each: holder id, event_id. They are written when
--                  all is done, and only into a record
--       run*       kind, holder (1..holders), seq, first, positions, form, n, then what the form asks for
--                    kind       + stored, - removed, ! leaves the block whatever its count
--                    first      position in its batch of the run's first block, from 1
--                    positions  '' where they follow each other, else `first,...,last`
--                    form       what follows, n each. key: engine hashes, each entry is the block's own 16 hex;
--                               value: engine hashes, then entries; same: nothing, engine hash and block are
--                               one, the entry is empty
--                  A run has one holder and names no block twice.
--
-- {'applied', blocks}   so many blocks of the call are done, from its beginning; less than all of them where
--                       64 KiB of values were read: call again with the rest
-- {'stale', watermark}  the watermark is there already; nothing written
-- {'fenced', 0}         somebody else has the stream, it is gone, or has lost writes; nothing written
-- {'lost', 0}           this shard, which has no record, has lost writes, or cannot tell how far a holder is counted;
--                       nothing written
--
-- `applied` in an engine hash is `<seq> <position>`: everything of this holder on this shard up to there is
-- counted. It is written last, in this same call, so what a lost reply or a crash makes come again is skipped.
-- A position counts every hash of its batch, also those that came to nothing: it means the same to whoever
-- resolves the batch again.

local VALUE_BYTES = 65536
local KEYS, ARGV = KEYS, ARGV -- a local is cheaper than a global, and there are five for every block

local publisher, token, commit = ARGV[1], ARGV[2], ARGV[3]
local holders = tonumber(ARGV[8])
local fence = KEYS[1]

local seen = redis.call('HMGET', fence, publisher, 'holder', 'seq:' .. publisher)
if seen[1] ~= token then return {'fenced', 0} end

-- Parse the runs before anything is written; each gets the index of its first block in KEYS.
local first_event = 9 + 2 * holders
local last_event = first_event + 2 * tonumber(ARGV[first_event])
local runs, at, block = {}, last_event + 1, 1 + holders
while ARGV[at] do
  local run = {
    kind = ARGV[at], holder = tonumber(ARGV[at + 1]), seq = tonumber(ARGV[at + 2]), first = tonumber(ARGV[at + 3]),
    positions = ARGV[at + 4], form = ARGV[at + 5], n = tonumber(ARGV[at + 6]), args = at + 6, keys = block,
  }
  run.last = run.positions == '' and run.first + run.n - 1 or tonumber(run.positions:match('%d+$'))
  runs[#runs + 1] = run
  block = block + run.n
  at = at + 7 + (run.form == 'key' and run.n or run.form == 'value' and 2 * run.n or 0)
end

local record, watermark = KEYS[block + 1], nil
if record then
  local state = redis.call('HMGET', record, 'token', 'watermark')
  if state[1] ~= token then return {'fenced', 0} end
  watermark = tonumber(state[2] or '')
  if ARGV[7] ~= '' and (watermark or -1) < tonumber(ARGV[7]) then return {'fenced', 0} end
  if commit ~= '' and watermark and watermark >= tonumber(commit) then return {'stale', watermark} end
end

if not record and ARGV[7] ~= '' and (tonumber(seen[3] or -1) or -1) < tonumber(ARGV[7]) then return {'lost', 0} end

-- A write that changes nothing, before all others: where Redis refuses writes (out of memory, read-only), it
-- refuses this one, and nothing has been done by halves.
redis.call('HSET', fence, publisher, token)

local marks = {}
for h = 1, holders do
  local applied = redis.call('HGET', KEYS[1 + h], 'applied')
  local id, mark = ARGV[7 + 2 * h], {seq = -1, position = 0}
  if applied then
    local seq, position = applied:match('^(%d+) (%d+)$')
    if not seq then return {'lost', 0} end
    mark.seq, mark.position = tonumber(seq), tonumber(position)
  elseif tonumber(id) > tonumber(seen[2] or 0) then
    redis.call('HSET', fence, 'holder', id)
    seen[2] = id
  end
  marks[h] = mark
end

local bytes_read = 0
-- Neighbours in a chain mostly have equal values, and equal strings are one object in Lua: each distinct value
-- is decoded once per holder and call.
local with_id, without_id = {}, {}

-- The value with `id` in its place; false where it is there already.
local function insert(value, id)
  local known = with_id[id] or {}
  with_id[id] = known
  if known[value] == nil and value:find('[^%d ]') then known[value] = id end -- nothing of ours wrote that
  if known[value] == nil then
    local ids, number, placed = {}, tonumber(id), false
    for each in value:gmatch('%d+') do
      if each == id then known[value] = false; return false end
      if not placed and tonumber(each) > number then ids[#ids + 1] = id; placed = true end
      ids[#ids + 1] = each
    end
    if not placed then ids[#ids + 1] = id end
    known[value] = table.concat(ids, ' ')
  end
  return known[value]
end

-- The value without `id`, '' where it was the only one; false where it is not there.
local function take(value, id)
  local known = without_id[id] or {}
  without_id[id] = known
  if known[value] == nil then
    local ids, found = {}, false
    for each in value:gmatch('%d+') do
      if each == id then found = true else ids[#ids + 1] = each end
    end
    known[value] = found and table.concat(ids, ' ')
  end
  return known[value]
end

local function call_if_any(command, key, list)
  if #list > 0 then redis.call(command, key, unpack(list)) end
end

local pads

-- Redis keeps the first 32 argument objects of a script's call for the next one, with the room they have, and what
-- MSET stores is such an object. In the place of an argument of more than 44 bytes it makes one that fits: of the
-- blocks with two holders, the first 15 of a call are 16 bytes smaller for it.
local function write_values(engine, pairs_)
  if #pairs_ == 0 then return end
  if not pads then
    local pad = ('-'):rep(45)
    pads = {}
    for i = 1, 30 do pads[i] = pad end
  end
  redis.call('HMGET', engine, unpack(pads))
  redis.call('MSET', unpack(pairs_))
end

-- Engine hash and entry of block i of a run; the block's 16 hex are the end of its key.
local function entry_of(run, i)
  local word = KEYS[run.keys + i]:sub(-16)
  if run.form == 'same' then return word, '' end
  return ARGV[run.args + i], run.form == 'key' and word or ARGV[run.args + run.n + i]
end

-- `*` says how many fields of the hash are no blocks: it keeps HLEN telling how many blocks a holder has.
local function count_copied(engine, change)
  if change == 0 then return end
  -- Entries are written by now, so what stands there and is no number gives way; HINCRBY would fail.
  local count = tonumber(redis.call('HGET', engine, '*') or 0) or 0
  redis.call('HSET', engine, '*', string.format('%.0f', count + change))
end

local function stored(run, from, to, engine, id, mode)
  local keys, entries, copied = {}, {}, {}
  local pairs_, values = {}, redis.call('MGET', unpack(KEYS, run.keys + from, run.keys + to))
  for i = from, to do
    local value, key = values[i - from + 1], KEYS[run.keys + i]
    local new = id
    if value then
      bytes_read = bytes_read + #value
      new = insert(value, id)
    end
    if new then
      pairs_[#pairs_ + 1] = key
      pairs_[#pairs_ + 1] = new
    elseif mode ~= 'set' then
      copied[#copied + 1] = '*' .. key:sub(-16)
    end
    local hash, entry = entry_of(run, i)
    entries[#entries + 1] = hash
    entries[#entries + 1] = entry
  end
  local first_copies = 0
  if #copied > 0 then
    local counts = redis.call('HMGET', engine, unpack(copied))
    for i, name in ipairs(copied) do
      if not counts[i] then first_copies = first_copies + 1 end
      entries[#entries + 1] = name
      entries[#entries + 1] = tostring((tonumber(counts[i] or 1) or 1) + 1)
    end
  end
  write_values(engine, pairs_)
  call_if_any('HSET', engine, entries)
  count_copied(engine, first_copies)
end

local function removed(run, from, to, engine, id, mode)
  local whole = run.kind == '!' or mode ~= 'count'
  local values = redis.call('MGET', unpack(KEYS, run.keys + from, run.keys + to))
  local counts = {}
  if not whole then
    local names = {}
    for i = from, to do names[#names + 1] = '*' .. KEYS[run.keys + i]:sub(-16) end
    counts = redis.call('HMGET', engine, unpack(names))
  end
  local empty, rest, gone, fewer, single = {}, {}, {}, {}, {}
  for i = from, to do
    local value, key = values[i - from + 1], KEYS[run.keys + i]
    local count = tonumber(counts[i - from + 1] or 1) or 1
    if value then bytes_read = bytes_read + #value end
    if count > 2 then
      fewer[#fewer + 1] = '*' .. key:sub(-16)
      fewer[#fewer + 1] = tostring(count - 1)
    elseif count == 2 then
      single[#single + 1] = '*' .. key:sub(-16)
    else
      local left = value and take(value, id)
      if left == '' then
        empty[#empty + 1] = key
      elseif left then
        rest[#rest + 1] = key
        rest[#rest + 1] = left
      end
      gone[#gone + 1] = (entry_of(run, i))
      if whole and mode ~= 'set' then single[#single + 1] = '*' .. key:sub(-16) end
    end
  end
  write_values(engine, rest)
  call_if_any('HSET', engine, fewer)
  if #empty > 0 then redis.call('DEL', unpack(empty)) end
  call_if_any('HDEL', engine, gone)
  if #single > 0 then count_copied(engine, -redis.call('HDEL', engine, unpack(single))) end
end

-- All of a run at once where none of its blocks exists: then no holder has them, this one neither, and there
-- is no count to read.
local function stored_new(run, from, engine, id)
  local pairs_, entries, at = {}, {}, 0
  local first_key, first_arg, form = run.keys, run.args, run.form
  for i = from, run.n do
    local key = KEYS[first_key + i]
    pairs_[at + 1], pairs_[at + 2] = key, id
    if form == 'key' then -- by far the most, so without a call
      entries[at + 1], entries[at + 2] = ARGV[first_arg + i], key:sub(-16)
    else
      entries[at + 1], entries[at + 2] = entry_of(run, i)
    end
    at = at + 2
  end
  if redis.call('MSETNX', unpack(pairs_)) == 0 then return false end
  redis.call('HSET', engine, unpack(entries))
  return true
end

-- The position of block i of a run.
local function position_of(run, i)
  if run.positions == '' then return run.first + i - 1 end
  local n = 0
  for position in run.positions:gmatch('%d+') do
    n = n + 1
    if n == i then return tonumber(position) end
  end
end

-- Index of the first block of the run that is not counted yet; beyond n where all are.
local function first_new(run, mark)
  if watermark and run.seq <= watermark then return run.n + 1 end
  if run.seq ~= mark.seq then return run.seq < mark.seq and run.n + 1 or 1 end
  if run.last <= mark.position then return run.n + 1 end
  if run.first > mark.position then return 1 end
  local i = 1
  while position_of(run, i) <= mark.position do i = i + 1 end
  return i
end

local done, moved = 0, {}
for _, run in ipairs(runs) do
  local mark, engine, id = marks[run.holder], KEYS[1 + run.holder], ARGV[7 + 2 * run.holder]
  local mode, i = ARGV[8 + 2 * run.holder], first_new(run, mark)
  if i <= run.n then
    if run.kind == '+' and stored_new(run, i, engine, id) then i = run.n + 1 end
    -- Neighbours are alike: the first value says how long the others will be.
    local chunk = i <= run.n and redis.call('STRLEN', KEYS[run.keys + i]) > 1024 and 16 or 128
    while i <= run.n and bytes_read <= VALUE_BYTES do
      local to, before = math.min(i + chunk - 1, run.n), bytes_read
      local one = run.kind == '+' and stored or removed
      one(run, i, to, engine, id, mode)
      i = to + 1
      chunk = bytes_read - before < 4096 and 128 or 16
    end
    if i > 1 then
      mark.seq, mark.position = run.seq, position_of(run, i - 1)
      moved[run.holder] = true
    end
  end
  done = done + i - 1
  if i <= run.n then break end
end

for h in pairs(moved) do
  redis.call('HSET', KEYS[1 + h], 'applied', string.format('%.0f %.0f', marks[h].seq, marks[h].position))
end
if record and done == block - 1 - holders then
  for i = first_event + 1, last_event, 2 do redis.call('HSET', record, 'event:' .. ARGV[i], ARGV[i + 1]) end
end
if commit ~= '' and done == block - 1 - holders then
  redis.call('HSET', record, 'watermark', commit, 'ts', ARGV[4], 'newest_ts', ARGV[5], 'digest', ARGV[6])
end
if not record and runs[1] and done == block - 1 - holders then
  -- Where none of this life is acknowledged, what stands there may be of the one before, whose numbers were larger.
  local is_first = ARGV[7] == '' or tonumber(ARGV[7]) < 0
  local last = math.max(runs[#runs].seq, not is_first and tonumber(seen[3]) or 0)
  redis.call('HSET', fence, 'seq:' .. publisher, string.format('%.0f', last))
end
return {'applied', done}
