-- apply_rows(fence, engine*, row*, branches, record?; publisher, token, watermark, ts, newest_ts, digest, calls, first, slots_max, bytes_max, holders#, events#2, seqs#, part*) -> {verdict, parts, offset, calls}
--
-- Apply folded batches of one stream to the rows of one shard, exactly once and in order. `app/waymark/domain/rows.py`
-- says what a row is.
--
-- KEYS  fence      hash    `<publisher>`: the highest lease token seen here; `holder`: the highest holder id;
--                          `calls:<publisher>`: how many calls of its stream were made here; `first:<publisher>`:
--                          the highest `first` of them; `blocks:<holder>`: its publisher, from its first block here until
--                          it is swept. These two are not on shard 0
--       engine*    hash    one for each holder in the call. Its fields: an entry for each row that has the holder;
--                          `*<key>`, the copies of a block; `applied`, see below
--       row*       string  rows, branch rows and singles, in the order in which the parts need them; then the rows that
--                          are needed only because a branch row belongs to them
--       branches   hash    head to number of branch rows
--       record     hash    the publisher's record; only on the shard that has it (shard 0), else absent. `late`: a call
--                          that was sent with fewer `calls` arrives late
-- ARGV  publisher  its integer id
--       token      the lease token the caller believes is the highest
--       watermark  the seq to move the watermark to when all parts are done; '' if another call does that
--       ts, newest_ts, digest   the values of that batch, written with the watermark
--       calls      the number of calls that this shard has acknowledged; a shard that has fewer has lost writes
--       first      the number of calls that shard 0 has acknowledged, for a call to another shard; else ''
--       slots_max  how many slots a row has at most
--       bytes_max  how many bytes of rows a call may read; it stops before the part that needs more
--       holders    how many holders are in the call; then the id of each
--       events     how many event_ids are written with this call; then for each: holder id, event_id. They are written
--                  when all parts are done, and only into a record
--       seqs       how many batches the parts belong to; then the seq of each
--       part*      one string each. The blocks of a part are consecutive blocks of one batch, for one holder, in one
--                  place, and no block is in it twice. Numbers are binary, big-endian
--                    1 byte   '+' stores the blocks, '-' removes them, '*' writes their copies only
--                    2 bytes  its holder, 1..holders
--                    2 bytes  its batch, 1..seqs
--                    4 bytes  position of the last block in its batch; positions go up by two
--                    2 bytes  number of its row in row*; for a part in a branch row, the row of its piece
--                    2 bytes  number of its branch row; 0 for none
--                    1 byte   number of blocks
--                    1 byte   1 with engine hashes, plus 2 with a namespace, plus 4 with a parent
--                    16 hex   the namespace, if there is one
--                    16 hex   the key of the block before the first, for a part in a shared branch row
--                    slots    17 characters each: 16 hex of the block's key, its depth in the piece
--                    engine hashes  8 bytes each; absent if they equal the seq_hashes
--                    copies   absent, or the new value of `*<key>` for each block, joined by semicolons; '' leaves the
--                             value, 0 deletes it
--
-- {'applied', parts, 0, calls}      the first `parts` parts are done. If these are not all, `bytes_max` were read: call
--                                   again with the others
-- {'branch', parts, offset, calls}  these parts are done, and `offset` blocks of the next part. The block after these has
--                                   no slot in its place: send it, and the blocks after it, with a branch row that
--                                   begins with it
-- {'row', parts, 0, calls}          these parts are done. The branch row of the next part does not exist, or does not have
--                                   its first block; and the row of its piece has that block, or has room: send the part
--                                   with the row
-- {'apart', parts, 0, calls}        these parts are done. In the shared branch row of the next part, its blocks would lie far
--                                   behind the holder's last one: send the part with a branch row of its own
-- {'stale', watermark, calls}       the watermark is as high already; nothing written
-- {'fenced', 0}                     another worker has the stream, the publisher is gone, writes are lost, or this call is
--                                   late, because the life of its batches has ended; nothing written
-- {'lost', 0}                       this shard, which has no record, has lost writes, or has begun to sweep one of the
--                                   holders, or its `applied` of a holder cannot be read; nothing written
--
-- `calls` is the number that this shard has afterwards, this call included.
--
-- A part states a result and not a difference: after it, the block is in the index or not, and `*<key>` has the value.
-- `applied` in an engine hash is `<seq> <position>`: all changes of this holder on this shard up to there are written.
-- The call that writes the changes also writes `applied`. So a call that arrives after later ones changes nothing, and
-- the worker that takes over knows which changes were counted.

local LONG = 4096 -- in a longer row a new holder is appended, and only the entry shows whether the row has the holder
local GAP = 8 -- a holder is not appended to a shared branch row that has this many slots beyond the holder's last hash
local SWEPT = '9007199254740991 0' -- `applied` after end_holder; no block has position 0
local DEAD = 2048 -- with more bytes of holders, no slot without a holder is searched for
-- A local is cheaper than a global.
local KEYS, ARGV, byte, sub, find, match, format =
  KEYS, ARGV, string.byte, string.sub, string.find, string.match, string.format

-- ---- check -------------------------------------------------------------------------------------------

local fence, publisher, token, commit = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local slots_max, bytes_max, holders = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local first_event = 13 + holders
local first_seq = first_event + 2 * tonumber(ARGV[first_event - 1]) + 1
local first_part = first_seq + tonumber(ARGV[first_seq - 1])

local seen = redis.call('HMGET', fence, publisher, 'holder', 'calls:' .. publisher, 'first:' .. publisher)
if seen[1] ~= token then return {'fenced', 0} end
local calls = tonumber(seen[3] or 0) or 0

-- `branches` and the record are the last two keys, or the record is absent.
local record = sub(KEYS[#KEYS], -9) ~= ':branches' and KEYS[#KEYS] or nil
local branches = record and KEYS[#KEYS - 1] or KEYS[#KEYS]
local prefix = #branches - 7 -- where the name in a key begins

local watermark = nil
if record then
  local state = redis.call('HMGET', record, 'token', 'watermark', 'late')
  if state[1] ~= token or tonumber(ARGV[7]) < (tonumber(state[3] or 0) or 0) then return {'fenced', 0} end
  watermark = tonumber(state[2] or '')
end
if calls < tonumber(ARGV[7]) then return {record and 'fenced' or 'lost', 0} end
if commit ~= '' and watermark and watermark >= tonumber(commit) then return {'stale', watermark, calls} end

local seqs = {}
for at = first_seq, first_part - 1 do seqs[at - first_seq + 1] = tonumber(ARGV[at]) end

local STORE, REMOVE, WRITE_COPIES = 43, 45, 42 -- the characters + - *
local parts, first_row, last_row = {}, 1 + holders, 0
for at = first_part, #ARGV do
  local word = ARGV[at]
  local kind, h1, h0, s1, s0, l3, l2, l1, l0, r1, r0, b1, b0, n, flags = byte(word, 1, 15)
  local row, branch, namespace, slots, hashes, above = 256 * r1 + r0, 256 * b1 + b0, '', 16, '', nil
  if flags > 1 then
    if flags % 4 > 1 then namespace, slots = sub(word, 16, 31), 32 end
    if flags > 3 then above, slots = sub(word, slots, slots + 15), slots + 16 end
  end
  local rest = slots + 17 * n
  if flags % 2 == 1 then
    hashes = sub(word, rest, rest + 8 * n - 1)
    rest = rest + 8 * n
  end
  local place = branch > 0 and branch or row
  if place > last_row then last_row = place end
  parts[at - first_part + 1] = {
    kind = kind, holder = 256 * h1 + h0, seq = seqs[256 * s1 + s0], last = 16777216 * l3 + 65536 * l2 + 256 * l1 + l0,
    row = row, branch = branch, place = place, namespace = namespace, slots = sub(word, slots, slots + 17 * n - 1),
    hashes = hashes, copies = rest > #word and '' or sub(word, rest), n = n, field = false, above = above,
  }
end

-- ---- read --------------------------------------------------------------------------------------------

-- A row up to byte `last`; false if there is none. No script of ours wrote a value of another type: a write replaces it.
local function beginning(i, last)
  local key = KEYS[first_row + i]
  return redis.call('TYPE', key).ok == 'string' and redis.call('GETRANGE', key, 0, last)
end

-- Rows are read in growing portions, so that the call stops after few rows if they are long. If the first one is long,
-- the others mostly are. Then only the beginning of the others is read, which has the slots.
local values, bytes_read, rows_read, portion = {}, 0, 0, 1
local is_cut_off = {}
while rows_read < last_row and bytes_read <= bytes_max do
  local to = math.min(rows_read + portion, last_row)
  if #(values[1] or '') > LONG then
    to = rows_read + 1
    values[to] = beginning(to, LONG)
    is_cut_off[to] = #(values[to] or '') > LONG
    bytes_read = bytes_read + #(values[to] or '')
  else
    for i, value in ipairs(redis.call('MGET', unpack(KEYS, first_row + rows_read + 1, first_row + to))) do
      values[rows_read + i] = value
      -- Only the beginning of a long first row counts, as it does for the others. Otherwise the call would end after
      -- the part of that row.
      bytes_read = bytes_read + (value and (rows_read == 0 and math.min(#value, LONG) or #value) or 0)
    end
    portion = bytes_read < 1024 * to and 4 * portion or 4
  end
  rows_read = to
end

local fields, asked = {}, {} -- for each engine hash: its values by name (false if there is none); the names to read
for h = 1, holders do fields[h], asked[h] = {}, {'applied'} end

for _, part in ipairs(parts) do
  if part.kind ~= WRITE_COPIES then
    -- The field of an entry is the name of the row; for a branch row, the head and a colon come first.
    local name, known = sub(KEYS[first_row + part.place], prefix), fields[part.holder]
    if part.branch > 0 then name = sub(KEYS[first_row + part.row], prefix) .. ':' .. sub(name, 1, 16) end
    part.field = name
    if values[part.place] and known[name] == nil then
      known[name] = false
      local names = asked[part.holder]
      names[#names + 1] = name
    end
  end
end

local marks, highest, new = {}, nil, {}
for h = 1, holders do
  local found = redis.call('HMGET', KEYS[1 + h], unpack(asked[h]))
  for i = 2, #asked[h] do fields[h][asked[h][i]] = found[i] end
  local seq, position = match(found[1] or '-1 0', '^(-?%d+) (%d+)$')
  -- A holder that is swept is dead, or shard 0 has lost its end in a failover: it would store nothing here any more.
  if not seq or found[1] == SWEPT then return {'lost', 0} end
  marks[h] = {seq = tonumber(seq), position = tonumber(position)}
  if not found[1] then -- the shard may not have seen a holder id as high as this one
    local id = tonumber(ARGV[11 + h])
    if id > (highest or tonumber(seen[2] or 0) or 0) then highest = id end
    if ARGV[8] ~= '' then new[#new + 1] = ARGV[11 + h] end
  end
end

-- ---- the short way -----------------------------------------------------------------------------------

-- Most parts are consecutive slots: new ones at the end of a row, or slots that the row has in this order. The changes
-- for one holder are noted apart from the row's value, and the new value is made once. Other parts cut up the
-- row (see `cut`).

local notes, written, appended = {}, {}, {} -- by row: its note; whether its value is new; the holders to append
local rows = {} -- the rows that are cut up

local changed = {} -- for each engine hash: the fields to write
for h = 1, holders do changed[h] = {} end

local function set_field(h, name, value)
  if fields[h][name] ~= value then
    fields[h][name] = value
    changed[h][name] = true
  end
end

-- A bitmap is two words of 32 bits.
local function text_of(id, low, high)
  if high > 0 then return format(' %s:%x%08x', id, high, low) end
  return low > 0 and format(' %s:%x', id, low) or ''
end

local function words_of(hex)
  if #hex <= 8 then return tonumber(hex, 16) or 0, 0 end
  return tonumber(sub(hex, -8), 16) or 0, tonumber(sub(hex, -16, -9), 16) or 0
end

-- The bits of a bitmap from slot `from` to the slot before `to`.
local function slice(low, high, from, to)
  if to <= 32 then return low % 2 ^ to - low % 2 ^ from, 0 end
  if from >= 32 then return 0, high % 2 ^ (to - 32) - high % 2 ^ (from - 32) end
  return low - low % 2 ^ from, high % 2 ^ (to - 32)
end

local counts = {} -- the changed numbers of branch rows, by head
local function count_branches(head, change)
  counts[head] = math.max(0, (counts[head] or tonumber(redis.call('HGET', branches, head) or 0) or 0) + change)
  return counts[head]
end

-- The slots and the mark of a row that is needed only because a branch row belongs to it.
local heads = {}
local function head_of(i)
  if heads[i] == nil then heads[i] = beginning(i, 17 * slots_max) end
  return heads[i]
end

-- Whether the branch row of a part is a shared one: it is named like its head, but for two digits.
local function is_shared(part) return part.branch > 0 and sub(part.field, 3, 16) == sub(part.field, 20) end

-- Whether readers look for the first block of a part in its shared branch row, if its parent is in the row of the piece.
local function is_named_for(part)
  local name, key, second = sub(part.field, 18), sub(part.slots, 1, 16), sub(part.field, 19, 19)
  return byte(name) == byte(key) and (second == sub(key, 2, 2) or second == sub(part.field, 2, 2))
end

-- Whether the slots at the beginning of a text have a block. A match counts only where a slot begins: digits across two
-- slots may equal a key.
local function lists(text, key)
  local slots = match(text, '^%w*')
  local at = find(slots, key, 1, true)
  while at and at % 17 ~= 1 do at = find(slots, key, at + 1, true) end
  return at ~= nil
end

-- Whether the first block of a part may be appended to a shared branch row, so that readers find it: they look there
-- only if the chain has a block that the row of the piece lists, followed by one that the row does not list. `added`
-- are slots behind those of `value`, whose first slot may look like that of the head.
local function may_share(part, value, added)
  if not part.above then return false end
  if lists(sub(value, 18), part.above) or lists(added, part.above) then return true end
  if rows[part.row] or part.row <= rows_read or not is_named_for(part) then return false end
  local head = head_of(part.row)
  return head and lists(head, part.above) and not lists(head, sub(part.slots, 1, 16))
end

-- Whether a part may begin a new row: its first block is the head, or begins a branch row of a marked row without it.
local function begins_row(part, key)
  local name = part.field
  if part.branch == 0 then return sub(name, 1, 16) == key end
  if sub(name, 18) ~= key or rows[part.row] or part.row <= rows_read then return false end
  local head = head_of(part.row)
  local mark = head and find(head, '+', 1, true)
  if not mark or mark % 17 ~= 1 or find(head, key, 1, true) then return false end
  count_branches(sub(name, 1, 16), 1)
  return true
end

-- A new note for the holder of a part; nil if the value does not have the simple form.
local function new_note(part)
  local i, h = part.place, part.holder
  local value, entry = values[i] or '', fields[h][part.field]
  if rows[i] then return nil end
  local space = find(value, ' ', 1, true) or #value + 1
  local is_marked = byte(value, space - 1) == 43
  local count = (space - (is_marked and 2 or 1)) / 17
  if count % 1 > 0 or count > slots_max or count == 0 and value ~= '' then return nil end
  local first, last, low, high = #value + 1, #value, 0, 0
  if #value > LONG then
    if entry then return nil end
  else
    local from, to = find(value, ' ' .. ARGV[11 + h] .. ':', space, true)
    if not from ~= not entry then return nil end
    if from then
      local hex = match(value, '^%x*', to + 1)
      first, last, low, high = from, to + #hex, words_of(hex)
    end
  end
  entry = entry or part.namespace == '' and '' or part.namespace .. ':'
  notes[i] = {
    holder = h, field = part.field, space = space, first = first, last = last, low = low, high = high, count = count,
    is_marked = is_marked, slots = '', entry = entry, hashes = '', length = #entry % 8 == 1 and #entry - 17 or #entry,
    is_changed = false,
  }
  return notes[i]
end

-- Writes the note into the value and the entry.
local function finish(i)
  local noted, value = notes[i], values[i] or ''
  notes[i] = nil
  if not noted.is_changed then return end
  local bits = text_of(ARGV[11 + noted.holder], noted.low, noted.high)
  set_field(noted.holder, noted.field, bits ~= '' and noted.entry .. noted.hashes)
  if #value > LONG and not written[i] then
    appended[i] = (appended[i] or '') .. bits
    return
  end
  value = sub(value, 1, noted.space - 1) .. noted.slots .. sub(value, noted.space, noted.first - 1)
    .. bits .. sub(value, noted.last + 1)
  values[i], written[i] = #value >= noted.space and value, true
end

-- Notes a part. Returns false, and changes nothing, if it cannot be noted.
local function note(part)
  local i, n, slots, hashes = part.place, part.n, part.slots, part.hashes
  local noted = notes[i]
  if noted and (noted.holder ~= part.holder or noted.low + noted.high == 0) then
    finish(i)
    noted = nil
  end
  noted = noted or new_note(part)
  if not noted then return false end
  local value, key = values[i] or '', sub(slots, 1, 16)
  local at = find(value, key, 1, true)
  if at then
    at = find(value, slots, at, true)
    if not at or at % 17 ~= 1 or at + 17 * n > noted.space then return false end
  end
  local from, low, high = noted.count, 0, 0
  if at then
    from = (at - 1) / 17
    low, high = slice(noted.low, noted.high, from, from + n)
  end

  if part.kind == REMOVE then
    if not at or noted.low + noted.high == 0 then return false end
    local is_left = noted.low > low or noted.high > high
    if not is_left and (noted.is_marked or part.branch > 0) then return false end -- it may be the last holder
    noted.low, noted.high, noted.is_changed = noted.low - low, noted.high - high, true
    return true
  end

  if hashes == '' and noted.length + #noted.hashes > 0 or hashes ~= '' and noted.length + #noted.hashes ~= 8 * from then return false end
  if not at then
    if noted.is_marked or from + n > slots_max or #value > LONG then return false end
    if from == 0 then
      if not begins_row(part, key) then return false end
    else
      if find(noted.slots, key, 1, true) then return false end
      if is_shared(part) and not may_share(part, value, noted.slots) then return false end
      for slot = 18, 17 * n, 17 do
        local next_key = sub(slots, slot, slot + 15)
        if find(value, next_key, 1, true) or find(noted.slots, next_key, 1, true) then return false end
      end
    end
    noted.slots, noted.count = noted.slots .. slots, from + n
  end
  local all_low, all_high = slice(4294967295, 4294967295, from, from + n)
  noted.low, noted.high = noted.low - low + all_low, noted.high - high + all_high
  noted.hashes, noted.is_changed = noted.hashes .. hashes, true
  return true
end

-- ---- any row -----------------------------------------------------------------------------------------

-- Each call has to make its functions again, which takes time. So those of this section are made when a part needs them.
local store, remove
local whole_read = 0 -- bytes of long rows that were read whole
local function prepare()
  local UNKNOWN = ('\255'):rep(8) -- in an entry: the engine hash is the seq_hash
  local POWER = {}
  for i = 0, 32 do POWER[i] = 2 ^ i end
  local function has_bit(word, at) return word % POWER[at + 1] >= POWER[at] end

  -- Cuts a row up: its slots, its mark, its holders in `text` from `at` on, and the new holders in `tail`. A value that
  -- does not have the form of a row counts as missing.
  local function cut(value)
    local row = {slots = '', mark = '', text = '', at = 1, tail = '', is_there = false}
    if not value then return row end
    local slots = (value:find(' ', 1, true) or #value + 1) - 1
    local mark = value:byte(slots) == 43 and '+' or ''
    slots = slots - #mark
    if slots % 17 == 0 and slots > 0 and slots <= 17 * slots_max then
      row.slots, row.mark, row.text, row.at, row.is_there = value:sub(1, slots), mark, value, slots + #mark + 1, true
    end
    return row
  end

  -- A row, cut up. If only the beginning of a long row was read, the whole row is read now.
  local function open(i)
    if notes[i] then finish(i) end
    if rows[i] then return rows[i] end
    if is_cut_off[i] then
      values[i], is_cut_off[i] = redis.call('MGET', KEYS[first_row + i])[1], false
      whole_read = whole_read + #values[i]
    end
    if appended[i] then values[i], written[i], appended[i] = values[i] .. appended[i], true, nil end
    rows[i] = cut(values[i])
    if written[i] then rows[i].is_changed, rows[i].has_new_head, written[i] = true, true, nil end
    return rows[i]
  end

  -- The row of a branch row's piece. Only its slots are read, unless the row is to be changed.
  local function open_piece(i, is_whole)
    if rows[i] or i <= rows_read then return open(i) end
    if not is_whole then
      local head = cut(head_of(i))
      if head.mark ~= '' then return head end
    end
    values[i] = redis.call('MGET', KEYS[first_row + i])[1]
    return open(i)
  end

  local function is_empty(row) return row.tail == '' and #row.text < row.at end

  local function delete(row)
    row.slots, row.mark, row.text, row.at, row.tail, row.index = '', '', '', 1, '', nil
    row.is_there, row.is_changed, row.has_new_head = false, true, true
  end

  -- The slot of a block, from 0. A match counts only where a slot begins: digits across two slots may equal a key.
  local function slot_of(row, key)
    if row.index then return row.index[key] end
    local at = find(row.slots, key, 1, true)
    while at and at % 17 ~= 1 do at = find(row.slots, key, at + 1, true) end
    return at and (at - 1) / 17
  end

  local function make_index(row)
    if row.index then return end
    local index, at = {}, 0
    for key in row.slots:gmatch('(................).') do
      index[key] = at
      at = at + 1
    end
    row.index = index
  end

  -- The place of a holder in the text of a row, and its bitmap as two words of 32 bits.
  local function bits_of(row, id, entry)
    if row.tail == '' and #row.text > LONG and not entry then return nil, nil, 0, 0 end
    local name = ' ' .. id .. ':'
    local first, last = find(row.text, name, row.at, true)
    if not first and row.tail:find(name, 1, true) then
      row.text, row.at, row.tail, row.has_new_head = row.text:sub(row.at) .. row.tail, 1, '', true
      first, last = row.text:find(name, 1, true)
    end
    if not first then return nil, nil, 0, 0 end
    local hex = match(row.text, '^%x*', last + 1)
    return first, last + #hex, words_of(hex)
  end

  local function write_bits(row, id, first, last, low, high)
    local bits = text_of(id, low, high)
    if first then
      row.text, row.at = row.text:sub(row.at, first - 1) .. bits .. row.text:sub(last + 1), 1
      row.has_new_head = true
    else
      row.tail = row.tail .. bits
    end
    row.is_changed = true
  end

  -- The slots that no holder has and that are not in `taken`, the lowest last. The first slot is never among them: it
  -- is the block whose key is the name of the value.
  local function dead_slots(row, taken)
    local dead, used, count = {}, {}, #row.slots / 17
    if #row.text - row.at + #row.tail > DEAD then return dead end
    for _, slot in ipairs(taken) do used[slot] = true end
    for hex in (row.text:sub(row.at) .. row.tail):gmatch(':(%x+)') do
      local low, high = words_of(hex)
      for slot = 0, count - 1 do
        if slot < 32 and has_bit(low, slot) or slot > 31 and has_bit(high, slot - 32) then used[slot] = true end
      end
    end
    for slot = count - 1, 1, -1 do
      if not used[slot] then dead[#dead + 1] = slot end
    end
    return dead
  end

  local function has_room(row)
    return row.mark == '' and (#row.slots < 17 * slots_max or #dead_slots(row, {}) > 0)
  end

  local function key_at(part, i) return sub(part.slots, 17 * i - 16, 17 * i - 1) end

  -- Appends slots for the blocks of a part from the i-th on, up to the first that has a slot, as far as there is room.
  -- Returns how many.
  local function append(row, part, i, found)
    local from = #row.slots / 17
    local n = math.min(part.n - i + 1, slots_max - from)
    if row.slots ~= '' then
      local to = 1
      while to < n and not slot_of(row, key_at(part, i + to)) do to = to + 1 end
      n = math.min(n, to)
    elseif key_at(part, i) ~= sub(KEYS[first_row + part.place], prefix, prefix + 15) then
      row.slots = sub(KEYS[first_row + part.place], prefix, prefix + 15) .. '0' -- its head, even if no holder has that block
      return append(row, part, i, found)
    end
    row.slots = row.slots .. sub(part.slots, 17 * i - 16, 17 * (i + n - 1))
    for more = 0, n - 1 do
      found[i + more] = from + more
      if row.index then row.index[key_at(part, i + more)] = from + more end
    end
    row.is_there, row.is_changed, row.has_new_head = true, true, true
    return n
  end

  -- Gives a dead slot to the i-th block of a part. Returns false if there is none.
  local function give_dead_slot(row, part, i, found)
    local slot = table.remove(dead_slots(row, found))
    if not slot then return false end
    if row.index then
      row.index[sub(row.slots, 17 * slot + 1, 17 * slot + 16)] = nil
      row.index[key_at(part, i)] = slot
    end
    row.slots = sub(row.slots, 1, 17 * slot) .. sub(part.slots, 17 * i - 16, 17 * i) .. sub(row.slots, 17 * slot + 18)
    found[i] = slot
    row.is_there, row.is_changed, row.has_new_head = true, true, true
    return true
  end

  -- The slots of a part's blocks. With `is_store` a block without a slot gets one, and the list ends before the first
  -- block for which there is none. Without it, the slot of such a block is false.
  local function slots_of(row, part, is_store)
    local found, i = {}, 1
    local at = row.slots ~= '' and find(row.slots, part.slots, 1, true)
    if at and at % 17 == 1 then -- most rows have the blocks in this order
      for block = 1, part.n do found[block] = (at - 1) / 17 + block - 1 end
      return found
    end
    if part.n > 3 and row.slots ~= '' then make_index(row) end
    while i <= part.n do
      local slot = slot_of(row, key_at(part, i))
      if slot or not is_store then
        found[i] = slot or false
        i = i + 1
      elseif row.mark ~= '' then
        return found
      elseif #row.slots < 17 * slots_max then
        i = i + append(row, part, i, found)
      elseif give_dead_slot(row, part, i, found) then
        i = i + 1
      else
        return found
      end
    end
    return found
  end

  -- The entry, with the engine hashes of the first n blocks of a part put at their slots.
  local function merged(entry, part, found, n)
    local body = entry or ''
    if #body % 8 == 1 then body = sub(body, 18) elseif #body % 8 > 1 then body = '' end
    local i = 1
    while i <= n and (part.hashes ~= '' or body ~= '') do
      local from, slot = i, found[i]
      while i < n and found[i + 1] == found[i] + 1 do i = i + 1 end
      local hashes = part.hashes ~= '' and sub(part.hashes, 8 * from - 7, 8 * i) or UNKNOWN:rep(i - from + 1)
      local count = #body / 8
      if count == slot then
        body = body .. hashes
      elseif count < slot then
        body = body .. UNKNOWN:rep(slot - count) .. hashes
      else
        body = sub(body, 1, 8 * slot) .. hashes .. sub(body, 8 * (slot + i - from + 1) + 1)
      end
      i = i + 1
    end
    return part.namespace == '' and body or part.namespace .. ':' .. body
  end

  local function mark_piece(piece, mark)
    if piece.mark ~= mark then piece.mark, piece.is_changed, piece.has_new_head = mark, true, true end
    if mark == '' and is_empty(piece) then delete(piece) end
  end

  -- nil if the part may go to its branch row, which may have to be made, or if the part needs none; else the verdict.
  local function refused(part)
    if part.branch == 0 then return nil end
    local row, key, shares = open(part.branch), part.slots:sub(1, 16), is_shared(part)
    if row.is_there then
      if not shares or slot_of(row, key) then return nil end
      -- Without a hash each slot of the entry up to this one costs 8 bytes.
      local entry = fields[part.holder][part.field] or ''
      if part.hashes ~= '' and #row.slots / 17 - #entry / 8 > GAP then return 'apart' end
      if part.above and (slot_of(row, part.above) or 0) > 0 then return nil end
    end
    local piece = open_piece(part.row)
    if slot_of(piece, key) or has_room(piece) then return 'row' end
    if shares then
      if not part.above or not is_named_for(part) or not slot_of(piece, part.above) then return 'branch' end
      if row.is_there then return nil end
    elseif KEYS[first_row + part.branch]:sub(prefix, prefix + 15) ~= key then
      return 'branch'
    end
    count_branches(KEYS[first_row + part.row]:sub(prefix), 1)
    mark_piece(open_piece(part.row, true), '+')
    return nil
  end

  -- Stores a part. Returns the verdict, and how many blocks are stored.
  store = function(part)
    local verdict = refused(part)
    if verdict then return verdict, 0 end
    local row, id, entry = open(part.place), ARGV[11 + part.holder], fields[part.holder][part.field]
    local found = slots_of(row, part, true)
    local n = #found
    if n > 0 then
      local first, last, low, high = bits_of(row, id, entry)
      local low_before, high_before = low, high
      for i = 1, n do
        local slot = found[i]
        if slot < 32 then
          if low % POWER[slot + 1] < POWER[slot] then low = low + POWER[slot] end
        elseif not has_bit(high, slot - 32) then
          high = high + POWER[slot - 32]
        end
      end
      if low ~= low_before or high ~= high_before then write_bits(row, id, first, last, low, high) end
      set_field(part.holder, part.field, merged(first and entry, part, found, n))
    end
    return n < part.n and 'branch' or 'applied', n
  end

  remove = function(part)
    local row, id, entry = open(part.place), ARGV[11 + part.holder], fields[part.holder][part.field]
    local first, last, low, high = bits_of(row, id, entry)
    if not first then return set_field(part.holder, part.field, false) end
    for _, slot in ipairs(slots_of(row, part, false)) do
      if slot and slot < 32 then
        if has_bit(low, slot) then low = low - POWER[slot] end
      elseif slot and has_bit(high, slot - 32) then
        high = high - POWER[slot - 32]
      end
    end
    write_bits(row, id, first, last, low, high)
    if low > 0 or high > 0 then return end
    set_field(part.holder, part.field, false)
    if not is_empty(row) then return end
    if part.branch == 0 then
      if row.mark == '' then delete(row) end
    else
      delete(row)
      if count_branches(KEYS[first_row + part.row]:sub(prefix), -1) == 0 then mark_piece(open_piece(part.row, true), '') end
    end
  end
end

-- ---- decide ------------------------------------------------------------------------------------------

local function write_copies(part, n)
  if part.copies == '' then return end
  local i = 0
  for value in (part.copies .. ';'):gmatch('([^;]*);') do
    i = i + 1
    if i > n then return end
    if value ~= '' then
      set_field(part.holder, '*' .. sub(part.slots, 17 * i - 16, 17 * i - 1), value ~= '0' and value)
    end
  end
end

local verdict, done, offset = 'applied', 0, 0
local is_news = commit ~= '' or first_event < first_seq - 1
local moved, moved_to = {}, {} -- for each engine hash: the seq and the position of its last block
for _, part in ipairs(parts) do
  local seq, mark, n = part.seq, marks[part.holder], part.n
  local is_done = watermark and seq <= watermark or seq < mark.seq or seq == mark.seq and part.last <= mark.position
  if not is_done then
    is_news = true
    if part.kind ~= WRITE_COPIES and part.place > rows_read then break end
    if part.kind ~= WRITE_COPIES and not note(part) then
      if whole_read > 0 and whole_read + bytes_read > bytes_max and is_cut_off[part.place] then break end
      if not store then prepare() end
      if part.kind == STORE then verdict, n = store(part) else remove(part) end
    end
    write_copies(part, n)
    if n > 0 then moved[part.holder], moved_to[part.holder] = part.seq, part.last - 2 * (part.n - n) end
    if verdict ~= 'applied' then
      offset = n
      break
    end
  end
  done = done + 1
end
if not is_news then return {'applied', done, 0, calls} end -- later calls have done all of this already

-- ---- write -------------------------------------------------------------------------------------------

-- The first write is small. If Redis refuses writes (out of memory, read-only), it refuses this one, so no call is left
-- half done.
calls = calls + 1
local counted = {'calls:' .. publisher, format('%.0f', calls)}
if highest then counted[3], counted[4] = 'holder', format('%.0f', highest) end
if (tonumber(ARGV[8]) or 0) > (tonumber(seen[4] or 0) or 0) then -- a late call has a lower one
  counted[#counted + 1], counted[#counted + 2] = 'first:' .. publisher, ARGV[8]
end
for _, id in ipairs(new) do -- if shard 0 loses a holder, only this shows that its blocks are to be swept
  counted[#counted + 1], counted[#counted + 2] = 'blocks:' .. id, publisher
end
redis.call('HSET', fence, unpack(counted))

-- Calls a command that takes many names; a long list is split over several calls.
local function call_all(command, key, list)
  for from = 1, #list, 4000 do
    local to = math.min(from + 3999, #list)
    if key then redis.call(command, key, unpack(list, from, to)) else redis.call(command, unpack(list, from, to)) end
  end
end

for head, count in pairs(counts) do
  if count > 0 then redis.call('HSET', branches, head, string.format('%.0f', count)) else redis.call('HDEL', branches, head) end
end

local pairs_, gone = {}, {}
for i in pairs(notes) do finish(i) end
for i in pairs(written) do
  if values[i] then
    pairs_[#pairs_ + 1] = KEYS[first_row + i]
    pairs_[#pairs_ + 1] = values[i]
  else
    gone[#gone + 1] = KEYS[first_row + i]
  end
end
for i, bits in pairs(appended) do redis.call('APPEND', KEYS[first_row + i], bits) end
for i, row in pairs(rows) do
  local key = KEYS[first_row + i]
  if row.is_changed and not row.is_there then
    gone[#gone + 1] = key
  elseif row.is_changed and not row.has_new_head and #row.text > LONG then
    redis.call('APPEND', key, row.tail)
  elseif row.is_changed then
    pairs_[#pairs_ + 1] = key
    pairs_[#pairs_ + 1] = row.slots .. row.mark .. row.text:sub(row.at) .. row.tail
  end
end
call_all('MSET', nil, pairs_)
call_all('DEL', nil, gone)

for h = 1, holders do
  local kept, dropped = {}, {}
  for name in pairs(changed[h]) do
    local value = fields[h][name]
    if value then
      kept[#kept + 1] = name
      kept[#kept + 1] = value
    else
      dropped[#dropped + 1] = name
    end
  end
  if moved[h] then
    kept[#kept + 1] = 'applied'
    kept[#kept + 1] = string.format('%.0f %.0f', moved[h], moved_to[h])
  end
  call_all('HDEL', KEYS[1 + h], dropped)
  call_all('HSET', KEYS[1 + h], kept)
end

if verdict == 'branch' then return {'branch', done, offset, calls} end
if verdict == 'row' then return {'row', done, 0, calls} end
if verdict == 'apart' then return {'apart', done, 0, calls} end
if done < #parts then return {'applied', done, 0, calls} end
if record then
  local moves = {}
  for i = first_event, first_seq - 2, 2 do
    moves[#moves + 1] = 'event:' .. ARGV[i]
    moves[#moves + 1] = ARGV[i + 1]
  end
  call_all('HSET', record, moves)
  if commit ~= '' then
    redis.call('HSET', record, 'watermark', commit, 'ts', ARGV[4], 'newest_ts', ARGV[5], 'digest', ARGV[6])
  end
end
return {'applied', done, 0, calls}
