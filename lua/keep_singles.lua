-- keep_singles(holders, record, fence; publisher, token, calls, version) -> {verdict, calls}
--
-- Mark a group as one that has blocks of unknown depth, before the first such block is written.
--
-- KEYS  holders  hash  the group's holder table
--       record   hash  the publisher's record
--       fence    hash  the fence of shard 0; `calls:<publisher>`: how many calls of its stream were made here
-- ARGV  publisher  its integer id
--       token      the lease token the caller believes is the highest
--       calls      the number of calls that this shard has acknowledged; a shard that has fewer has lost writes
--       version    a random nonce
--
-- {'applied', calls}  the group is marked now. `calls` also counts this call if the group was marked before: a Redis that
--                     loses the mark also loses this count
-- {'fenced', 0}       another worker has the stream, the publisher is gone, or writes are lost; nothing written

if redis.call('HGET', KEYS[2], 'token') ~= ARGV[2] then return {'fenced', 0} end
local name = 'calls:' .. ARGV[1]
local calls = tonumber(redis.call('HGET', KEYS[3], name) or 0) or 0
if calls < tonumber(ARGV[3]) then return {'fenced', 0} end
redis.call('HSET', KEYS[3], name, string.format('%.0f', calls + 1))
if redis.call('HSETNX', KEYS[1], 'singles', '1') == 1 then redis.call('HSET', KEYS[1], 'version', ARGV[4]) end
return {'applied', calls + 1}
