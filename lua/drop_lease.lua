-- drop_lease(lease, record; token) -> {verdict, 0}
--
-- Release a lease, if the caller still has it.
--
-- KEYS  lease   string, PX  the token of the worker that has the lease
--       record  hash        the publisher's record
-- ARGV  token   the caller's token
--
-- {'applied', 0}  the lease is free
-- {'fenced', 0}   another worker has it; nothing written
-- {'gone', 0}     the publisher does not exist any more; nothing written

if redis.call('EXISTS', KEYS[2]) == 0 then return {'gone', 0} end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced', 0} end
redis.call('DEL', KEYS[1])
if redis.call('HGET', KEYS[2], 'token') == ARGV[1] then redis.call('HDEL', KEYS[2], 'worker') end
return {'applied', 0}
