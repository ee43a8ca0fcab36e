-- new_life(holders, record, fence, dead; publisher, token, calls, before, version, above, unit, life, begin*) -> {verdict, calls, holder*}
--
-- End holders of a publisher and begin others. Readers see one step, however many blocks the ended holders had. With
-- `unit` '' the script only begins holders, for a new medium or rank. The same call may arrive twice, and late: the
-- script makes the change once, and never after a later change.
--
-- KEYS  holders  hash  the group's holder table; `version` is a new nonce after every change
--       record   hash  the publisher's record; `holder:<name>` is the id of its live holder of that name,
--                      `event:<id>` the last event_id of a holder, `shard:<number>` the calls on a shard, `turn` the
--                      token and version of the last call, `late`: a call of another script that was sent with fewer
--                      `calls` than this one arrives late
--       fence    hash  the fence of shard 0; `holder`: the highest holder id that was assigned or seen. Without it this
--                      Redis has come back empty, and ids begin at the microseconds since 2026-01-01 UTC by its TIME.
--                      `calls:<publisher>`: how many calls of its stream were made here
--       dead     set   holder ids whose blocks are still to be swept
-- ARGV  publisher  its integer id
--       token    the lease token the caller believes is the highest
--       calls    the number of calls that this shard has acknowledged; a shard that has fewer has lost writes
--       before   the version of the last call under this token whose reply the caller has seen; '' for none
--       version  a random nonce; a repeated call has the same nonce
--       above    the highest holder id seen on the other shards; 0 if there are none
--       unit     which holders end: '*' all; '' none; else the holder of this name, and those whose names begin with it
--                and a space (names are `<rank> <medium> ...`, so '0' ends all holders of rank 0)
--       life     '' continues the life of the stream; a random nonce begins a new one, and deletes the fields of the old
--                one (watermark, flags, repair, ...) from the record
--       begin*   name, holder record (JSON without the id); a name that is still live keeps its id
--
-- {'applied', calls, holder*}  the ids of begin*, in order. `calls` counts this call. If the last call was this one,
--                       nothing is written again
-- {'fenced'}            another worker has the stream, the publisher is gone, or the last call was not `before`: this
--                       call is late, or Redis has lost writes; nothing written

-- The first id of a Redis that came back empty. No id that was assigned before is as large, because a Redis assigns far
-- fewer than one per microsecond. It has at least 14 digits, and is below 2^53 for 285 years.
local function first_id()
  local now = redis.call('TIME')
  return math.max(0, (tonumber(now[1]) - 1767225600) * 1000000 + tonumber(now[2]))
end

-- A count as a script has written it; nil for any other text.
local function integer(text) return text and #text < 17 and text:match('^%d+$') and tonumber(text) or nil end

local holders, record, fence, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local unit = ARGV[7]

local fields = redis.call('HGETALL', record)
local live, token, change = {}, nil, ''
for i = 1, #fields, 2 do
  local name = fields[i]:match('^holder:(.*)$')
  if name then live[name] = fields[i + 1] end
  if fields[i] == 'token' then token = fields[i + 1] end
  if fields[i] == 'turn' then change = fields[i + 1] end
end
if token ~= ARGV[2] then return {'fenced'} end

local by, last = change:match('^(%S+) (%S+)$')
if by ~= token then last = '' end
local about = redis.call('HMGET', fence, 'holder', 'calls:' .. ARGV[1])
local known, calls = about[1], tonumber(about[2] or 0) or 0
if last == ARGV[5] then
  local ids = {}
  for i = 9, #ARGV, 2 do ids[#ids + 1] = tonumber(live[ARGV[i]]) end
  return {'applied', calls, unpack(ids)}
end
if last ~= ARGV[4] or calls < tonumber(ARGV[3]) then return {'fenced'} end

for name, id in pairs(live) do
  if unit == '*' or name == unit or (unit ~= '' and name:sub(1, #unit + 1) == unit .. ' ') then
    redis.call('HDEL', holders, id) -- a removal comes first (rule 3)
    redis.call('SADD', dead, id)
    redis.call('HDEL', record, 'holder:' .. name, 'event:' .. id)
    live[name] = nil
  end
end

if ARGV[8] ~= '' then
  redis.call('HDEL', record, 'watermark', 'ts', 'newest_ts', 'digest', 'flags', 'main_groups', 'count:missing',
    'repair')
  for i = 1, #fields, 2 do
    local beginning = fields[i]:sub(1, 6)
    if beginning == 'event:' or beginning == 'shard:' then redis.call('HDEL', record, fields[i]) end
  end
  redis.call('HSET', record, 'life', ARGV[8])
end

local ids, highest = {}, math.max(integer(known) or first_id(), tonumber(ARGV[6]))
for i = 9, #ARGV, 2 do
  local id = live[ARGV[i]]
  if not id then
    highest = highest + 1
    id = string.format('%.0f', highest)
    redis.call('HSET', holders, id, ARGV[i + 1])
    redis.call('HSET', record, 'holder:' .. ARGV[i], id)
  end
  ids[#ids + 1] = tonumber(id)
end
redis.call('HSET', fence, 'holder', string.format('%.0f', highest), 'calls:' .. ARGV[1], string.format('%.0f', calls + 1))
redis.call('HSET', holders, 'version', ARGV[5])
redis.call('HSET', record, 'turn', token .. ' ' .. ARGV[5], 'late', ARGV[3])
return {'applied', calls + 1, unpack(ids)}
