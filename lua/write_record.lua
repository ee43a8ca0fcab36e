-- write_record(record, fence; publisher, token, calls, field*) -> {verdict, calls}
--
-- Write the state of a stream into its publisher's record: status, counters, flags.
--
-- KEYS  record     hash  the publisher's record
--       fence      hash  the fence of shard 0; `calls:<publisher>`: how many calls of its stream were made here
-- ARGV  publisher  its integer id
--       token      the lease token the caller believes is the highest
--       calls      the number of calls that this shard has acknowledged; a shard that has fewer has lost writes
--       field*     name, value; an empty value deletes the field
--
-- {'applied', calls}  written; `calls` counts this call
-- {'fenced', 0}       another worker has the stream, the publisher is gone, or writes are lost; nothing written

if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return {'fenced', 0} end
local name = 'calls:' .. ARGV[1]
local calls = tonumber(redis.call('HGET', KEYS[2], name) or 0) or 0
if calls < tonumber(ARGV[3]) then return {'fenced', 0} end
redis.call('HSET', KEYS[2], name, string.format('%.0f', calls + 1))
for i = 4, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[1], ARGV[i])
  else
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
return {'applied', calls + 1}
