-- mark_publisher(holders, record; publisher, token, row, version) -> {verdict, 0}
--
-- Replace the row of a publisher in the table: it is lost, or it is back.
--
-- KEYS  holders    hash  the group's holder table
--       record     hash  the publisher's record
-- ARGV  publisher  its integer id
--       token      the lease token the caller believes is the highest
--       row        what readers need to know of it, JSON
--       version    a random nonce
--
-- {'applied', 0}  readers see it
-- {'fenced', 0}   somebody else has the stream, or it is gone; nothing written

if redis.call('HGET', KEYS[2], 'token') ~= ARGV[2] then return {'fenced', 0} end
redis.call('HSET', KEYS[1], 'publisher:' .. ARGV[1], ARGV[3], 'version', ARGV[4])
return {'applied', 0}
