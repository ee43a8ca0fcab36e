-- claim_publisher(publishers, unregistered; publisher, expected, registration, restores) -> {verdict, 0}
--
-- Write a publisher's registration, if it is still the one that the caller has read.
--
-- KEYS  publishers    hash  `["instance","tenant",rank]`: the registration, JSON
--       unregistered  zset  the publishers that were unregistered last, by Redis time; in the slot of publishers
-- ARGV  publisher     the field
--       expected      what the caller has seen there; '' nothing
--       registration  what shall stand there; '' nothing: it is unregistered
--       restores      '1' where the caller puts back what Redis has lost, '0' else
--
-- {'applied', 0}  it does
-- {'stale', 0}    something else stood there; nothing written
-- {'gone', 0}     what is to be put back was unregistered in this Redis; nothing written

-- Beyond this many the oldest is forgotten.
local MOST = 10000

if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return {'stale', 0} end
if ARGV[4] == '1' and redis.call('ZSCORE', KEYS[2], ARGV[1]) then return {'gone', 0} end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZADD', KEYS[2], redis.call('TIME')[1], ARGV[1])
  if redis.call('ZCARD', KEYS[2]) > MOST then
    redis.call('ZREM', KEYS[2], redis.call('ZRANGE', KEYS[2], 0, 0)[1])
  end
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
  redis.call('ZREM', KEYS[2], ARGV[1])
end
return {'applied', 0}
