-- keep_singles(holders; version) -> {verdict}
--
-- Tell readers that a group has blocks of unknown depth, before there is the first.
--
-- KEYS  holders  hash  the group's holder table
-- ARGV  version  a random nonce
--
-- {'applied'}  they know
-- {'stale'}    they did already; nothing written

if redis.call('HEXISTS', KEYS[1], 'singles') == 1 then return {'stale'} end
redis.call('HSET', KEYS[1], 'singles', '1', 'version', ARGV[1])
return {'applied'}
