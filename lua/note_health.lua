-- note_health(load, changes, record, fence; publisher, token, calls, milliseconds) -> {verdict, calls}
--
-- Note whether the event stream of a publisher shows that its engine cannot be reached. Decisions leave such an
-- engine out. The same call may arrive twice, and late: after a later call it writes nothing.
--
-- KEYS  load          hash  the load of each target; `health:<publisher>`: whether it is left out of decisions
--       changes       zset  the targets whose loads have changed, each by the number of its last change
--       record        hash  the publisher's record; `late`: a call that was sent with fewer `calls` arrives late
--       fence         hash  the fence of shard 0; `calls:<publisher>`: how many calls of its stream were made here
-- ARGV  publisher     its integer id
--       token         the lease token the caller believes is the highest
--       calls         the number of calls that this shard has acknowledged; a shard that has fewer has lost writes
--       milliseconds  how long this is valid, so that the note of a dead worker expires; '0': the engine is reached, which
--                     also clears the failures of earlier requests
--
-- {'applied', calls}  noted; `calls` counts this call
-- {'fenced', 0}       another worker has the stream, the publisher is gone, writes are lost, or this call is late; nothing
--                     written

-- Notes that a load has changed, for `read_loads`. The very first number is the time, so that a new list of changes
-- does not repeat numbers of an earlier one.
local function note(name)
  local last = redis.call('ZRANGE', KEYS[2], 0, 0, 'REV', 'WITHSCORES')[2]
  if not last then
    local begun = redis.call('TIME')
    last = begun[1] * 1000000 + begun[2]
  end
  redis.call('ZADD', KEYS[2], string.format('%.0f', last + 1), name)
end

local state = redis.call('HMGET', KEYS[3], 'token', 'late')
if state[1] ~= ARGV[2] then return {'fenced', 0} end
local name = 'calls:' .. ARGV[1]
local calls = tonumber(redis.call('HGET', KEYS[4], name) or 0) or 0
local sent, late = tonumber(ARGV[3]), tonumber(state[2] or 0) or 0
if calls < sent or sent < late then return {'fenced', 0} end
redis.call('HSET', KEYS[4], name, string.format('%.0f', calls + 1))
redis.call('HSET', KEYS[3], 'late', ARGV[3])
local field = 'health:' .. ARGV[1]
if ARGV[4] == '0' then
  redis.call('HDEL', KEYS[1], field)
else
  local time = redis.call('TIME')
  local away = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[4]
  local failures = (redis.call('HGET', KEYS[1], field) or '0 0 0 0 - 0'):gsub('%d+$', '')
  redis.call('HSET', KEYS[1], field, failures .. string.format('%.0f', away))
end
note(ARGV[1])
return {'applied', calls + 1}
