-- renew_lease(lease, record; token, milliseconds) -> {verdict, 0}
--
-- Extend a lease. A lease that ran out is taken again, if no other worker has taken it meanwhile.
--
-- KEYS  lease         string, PX  the token of the worker that has the lease
--       record        hash        the publisher's record
-- ARGV  token         the caller's token
--       milliseconds  how long the lease lasts from now
--
-- {'applied', 0}  the caller has the lease
-- {'fenced', 0}   another worker has the stream, or the publisher is gone; nothing written

if redis.call('HGET', KEYS[2], 'token') ~= ARGV[1] then return {'fenced', 0} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'applied', 0}
