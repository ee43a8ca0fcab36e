-- claim_publisher(publishers; publisher, expected, registration) -> {verdict, 0}
--
-- Write a publisher's registration, if it still is what the caller has seen.
--
-- KEYS  publishers    hash  `["instance","tenant",rank]`: the registration, JSON
-- ARGV  publisher     the field
--       expected      what the caller has seen there; '' nothing
--       registration  what shall stand there; '' nothing
--
-- {'applied', 0}  it does
-- {'stale', 0}    something else stood there; nothing written

if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return {'stale', 0} end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
return {'applied', 0}
