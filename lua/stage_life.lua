-- stage_life(holders, record, fence, dead; publisher, token, calls, before, version, above, step, life, watermark, ts, newest_ts, digest, flags, main_groups, shards#2, begin*) -> {verdict, calls, holder*}
--
-- Prepare the holders of a new life that readers do not see, and then replace the old life with it in one step. A
-- snapshot of an engine's cache is applied in this way, so that queries see the old life until it is complete. The same call may
-- arrive twice, and late: the script makes the change once, and never after a later change.
--
-- KEYS  holders  hash  the group's holder table; `version` is a new nonce after every change
--       record   hash  the publisher's record; `staged:<name>` is the id of a holder of the new life, `late` is as in
--                      new_life
--       fence    hash  the fence of shard 0; `holder`: the highest holder id that was assigned or seen;
--                      `calls:<publisher>`: how many calls of its stream were made here
--       dead     set   holder ids whose blocks are still to be swept
-- ARGV  publisher, token, calls, before, version, above   as in new_life
--       step     'begin' assigns ids to the holders begin*, which belong to the new life; 'take' ends the live holders
--                and makes those of the new life live; 'fill' does the same, but a requested repair stays requested;
--                'drop' ends the holders of the new life, or only begin* if there are any
--       life     with 'take' and 'fill': a random nonce, the name of the new life
--       watermark, ts, newest_ts, digest, flags, main_groups   with these: the fields of the record that belong to the
--                new life; without a watermark it has none yet, and without a digest none is known
--       shards   how many shards have got blocks since the last commit; then for each: its number, and how many
--                calls it has acknowledged
--       begin*   name, holder record (JSON without the id); with 'take' and 'fill' all holders of the new life
--
-- {'applied', calls, holder*}  the ids of begin*, in order. `calls` counts this call. If the last call was this one,
--                       nothing is written again
-- {'fenced'}            another worker has the stream, the publisher is gone, a holder of begin* was not begun, the last
--                       call was not `before`; nothing written

-- As in new_life: an id that no Redis with this clock has reached, one per microsecond.
local function first_id()
  local now = redis.call('TIME')
  return math.max(0, (tonumber(now[1]) - 1767225600) * 1000000 + tonumber(now[2]))
end

-- A count as a script has written it; nil for any other text.
local function integer(text) return text and #text < 17 and text:match('^%d+$') and tonumber(text) or nil end

local holders, record, fence, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local step, first = ARGV[7], 16 + 2 * tonumber(ARGV[15])
local takes = step == 'take' or step == 'fill'

local fields = redis.call('HGETALL', record)
local live, staged, token, change = {}, {}, nil, ''
for i = 1, #fields, 2 do
  local name, value = fields[i], fields[i + 1]
  if name:sub(1, 7) == 'holder:' then live[name:sub(8)] = value end
  if name:sub(1, 7) == 'staged:' then staged[name:sub(8)] = value end
  if name == 'token' then token = value end
  if name == 'turn' then change = value end
end
if token ~= ARGV[2] then return {'fenced'} end

local function ids_of(names)
  local ids = {}
  for i = first, #ARGV, 2 do ids[#ids + 1] = tonumber(names[ARGV[i]]) end
  return ids
end

local by, last = change:match('^(%S+) (%S+)$')
if by ~= token then last = '' end
local about = redis.call('HMGET', fence, 'holder', 'calls:' .. ARGV[1])
local calls = tonumber(about[2] or 0) or 0
if last == ARGV[5] then return {'applied', calls, unpack(ids_of(takes and live or staged))} end
if last ~= ARGV[4] or calls < tonumber(ARGV[3]) then return {'fenced'} end
if takes and #ids_of(staged) * 2 ~= #ARGV - first + 1 then return {'fenced'} end

local function end_all(ids, beginning)
  for name, id in pairs(ids) do
    redis.call('SADD', dead, id)
    redis.call('HDEL', holders, id)
    redis.call('HDEL', record, beginning .. name, 'event:' .. id)
  end
end

if step == 'begin' then
  local highest = math.max(integer(about[1]) or first_id(), tonumber(ARGV[6]))
  for i = first, #ARGV, 2 do
    if not staged[ARGV[i]] then
      highest = highest + 1
      staged[ARGV[i]] = string.format('%.0f', highest)
      redis.call('HSET', record, 'staged:' .. ARGV[i], staged[ARGV[i]])
    end
  end
  redis.call('HSET', fence, 'holder', string.format('%.0f', highest))
elseif step == 'drop' then
  local some = {}
  for i = first, #ARGV, 2 do some[ARGV[i]] = staged[ARGV[i]] end
  end_all(first > #ARGV and staged or some, 'staged:')
else
  end_all(live, 'holder:')
  for i = 1, #fields, 2 do
    if fields[i]:sub(1, 6) == 'shard:' then redis.call('HDEL', record, fields[i]) end
  end
  redis.call('HDEL', record, 'digest', 'flags', 'main_groups', 'count:missing')
  if step == 'take' then redis.call('HDEL', record, 'repair') end
  for i = first, #ARGV, 2 do
    local id = staged[ARGV[i]]
    redis.call('HSET', holders, id, ARGV[i + 1])
    redis.call('HSET', record, 'holder:' .. ARGV[i], id)
    redis.call('HDEL', record, 'staged:' .. ARGV[i])
    live[ARGV[i]], staged[ARGV[i]] = id, nil
  end
  end_all(staged, 'staged:')
  for i = 16, first - 1, 2 do redis.call('HSET', record, 'shard:' .. ARGV[i], ARGV[i + 1]) end
  if ARGV[12] ~= '' then redis.call('HSET', record, 'digest', ARGV[12]) end
  if ARGV[13] ~= '' then redis.call('HSET', record, 'flags', ARGV[13]) end
  if ARGV[14] ~= '' then redis.call('HSET', record, 'main_groups', ARGV[14]) end
  redis.call('HSET', holders, 'version', ARGV[5])
  redis.call('HSET', record, 'life', ARGV[8])
  if ARGV[9] ~= '' then
    redis.call('HSET', record, 'watermark', ARGV[9], 'ts', ARGV[10], 'newest_ts', ARGV[11])
  else
    redis.call('HDEL', record, 'watermark', 'ts', 'newest_ts')
  end
end
redis.call('HSET', fence, 'calls:' .. ARGV[1], string.format('%.0f', calls + 1))
redis.call('HSET', record, 'turn', token .. ' ' .. ARGV[5], 'late', ARGV[3])
return {'applied', calls + 1, unpack(ids_of(takes and live or staged))}
