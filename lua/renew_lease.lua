-- renew_lease(lease, record; token, milliseconds) -> {verdict, 0}
--
-- Extend a lease. A lease that ran out is taken again, if no other worker has taken it meanwhile.
--
-- KEYS  lease         string, PX  the token of the worker that has the lease
--       record        hash        the publisher's record
-- ARGV  token         the caller's token
--       milliseconds  how long it holds from now
--
-- {'applied', 0}  it holds
-- {'fenced', 0}   somebody else has the stream, or it is gone; nothing written

if redis.call('HGET', KEYS[2], 'token') ~= ARGV[1] then return {'fenced', 0} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'applied', 0}
