-- write_record(record, fence; publisher, token, calls, field*) -> {verdict, calls}
--
-- Write the state of a stream into its publisher's record: status, counters, flags. The same call may arrive twice, and
-- late: after a later call it writes nothing.
--
-- KEYS  record     hash  the publisher's record; `late`: a call that was sent with fewer `calls` arrives late
--       fence      hash  the fence of shard 0; `calls:<publisher>`: how many calls of its stream were made here
-- ARGV  publisher  its integer id
--       token      the lease token the caller believes is the highest
--       calls      the number of calls that this shard has acknowledged; a shard that has fewer has lost writes
--       field*     name, value; an empty value deletes the field
--
-- {'applied', calls}  written; `calls` counts this call
-- {'fenced', 0}       another worker has the stream, the publisher is gone, writes are lost, or this call is late; nothing
--                     written

local state = redis.call('HMGET', KEYS[1], 'token', 'late')
if state[1] ~= ARGV[2] then return {'fenced', 0} end
local name = 'calls:' .. ARGV[1]
local calls = tonumber(redis.call('HGET', KEYS[2], name) or 0) or 0
local sent, late = tonumber(ARGV[3]), tonumber(state[2] or 0) or 0
if calls < sent or sent < late then return {'fenced', 0} end
redis.call('HSET', KEYS[2], name, string.format('%.0f', calls + 1))
redis.call('HSET', KEYS[1], 'late', ARGV[3])
for i = 4, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[1], ARGV[i])
  else
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
return {'applied', calls + 1}
