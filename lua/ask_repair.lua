-- ask_repair(record; nonce) -> {verdict, 0}
--
-- Ask the worker that applies a stream to repair it: it sees the mark when it renews its lease.
--
-- KEYS  record  hash  the publisher's record; `repair` stays until the stream has another life, also that of a snapshot
-- ARGV  nonce   a random nonce
--
-- {'applied', 0}  the record has the mark
-- {'gone', 0}     the publisher does not exist; nothing written

if redis.call('HEXISTS', KEYS[1], 'life') == 0 then return {'gone', 0} end
redis.call('HSET', KEYS[1], 'repair', ARGV[1])
return {'applied', 0}
