-- renew_lease(lease, record; token, milliseconds) -> {verdict, repair}
--
-- Extend a lease. A lease that ran out is taken again, if no other worker has taken it meanwhile.
--
-- KEYS  lease         string, PX  the token of the worker that has the lease
--       record        hash        the publisher's record; `repair`: somebody asks for a repair
-- ARGV  token         the caller's token
--       milliseconds  how long the lease lasts from now
--
-- {'applied', repair}  the caller has the lease; `repair` is 1 if a repair is asked for, else 0
-- {'fenced', 0}        another worker has the stream, or the publisher is gone; nothing written

if redis.call('HGET', KEYS[2], 'token') ~= ARGV[1] then return {'fenced', 0} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'applied', redis.call('HEXISTS', KEYS[2], 'repair')}
