-- drop_fence(fence; publisher, token) -> {verdict, 0}
--
-- Forget an ended publisher on one shard. A fence without a token rejects every caller, as one with a higher token does,
-- and the id of the publisher is never used again.
--
-- KEYS  fence      hash  the fence of the shard
-- ARGV  publisher  its integer id
--       token      the token under which it was ended; '' for any, if its record is known to be gone
--
-- {'applied', 0}  the fence no longer has anything about the publisher, except holders that are still to be swept
-- {'fenced', 0}   the fence has another token; nothing written

local seen = redis.call('HGET', KEYS[1], ARGV[1])
if seen and ARGV[2] ~= '' and seen ~= ARGV[2] then return {'fenced', 0} end
redis.call('HDEL', KEYS[1], ARGV[1], 'calls:' .. ARGV[1], 'first:' .. ARGV[1])
return {'applied', 0}
