-- write_record(record; token, field*) -> {verdict, 0}
--
-- Write the state of a stream into its publisher's record: status, counters, flags.
--
-- KEYS  record  hash  the publisher's record
-- ARGV  token   the lease token the caller believes is the highest
--       field*  name, value; an empty value takes the field out
--
-- {'applied', 0}  written
-- {'fenced', 0}   somebody else has the stream, or it is gone; nothing written

if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return {'fenced', 0} end
for i = 2, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[1], ARGV[i])
  else
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
return {'applied', 0}
