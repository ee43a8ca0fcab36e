-- mark_publisher(holders, record, fence; publisher, token, calls, row, version) -> {verdict, calls}
--
-- Replace the row of a publisher in the table: it is lost, or it is back.
--
-- KEYS  holders    hash  the group's holder table
--       record     hash  the publisher's record
--       fence      hash  shard 0's; `calls:<publisher>`: how many calls of its stream were made here
-- ARGV  publisher  its integer id
--       token      the lease token the caller believes is the highest
--       calls      the number of calls that this shard has acknowledged; a shard that has fewer has lost writes
--       row        what readers need to know of it, JSON
--       version    a random nonce
--
-- {'applied', calls}  readers see it; `calls` counts this call
-- {'fenced', 0}       somebody else has the stream, it is gone, or has lost writes; nothing written

if redis.call('HGET', KEYS[2], 'token') ~= ARGV[2] then return {'fenced', 0} end
local name = 'calls:' .. ARGV[1]
local calls = tonumber(redis.call('HGET', KEYS[3], name) or 0) or 0
if calls < tonumber(ARGV[3]) then return {'fenced', 0} end
redis.call('HSET', KEYS[3], name, string.format('%.0f', calls + 1))
redis.call('HSET', KEYS[1], 'publisher:' .. ARGV[1], ARGV[4], 'version', ARGV[5])
return {'applied', calls + 1}
