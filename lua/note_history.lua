-- note_history(history, holders; publisher, capacity, block*) -> {verdict, count}
--
-- Note the blocks of a prompt that goes to a target, as the latest of all blocks that went there. The target may have
-- `capacity` blocks; beyond that, the ones that went there longest ago are dropped.
--
-- KEYS  history    zset  blocks of prompts that went to the target, each by the Redis us of the last time
--       holders    hash  the group's holder table; for a target that is not in it nothing is written
-- ARGV  publisher  the target
--       capacity   the most blocks of the target
--       block*     at most 512, in the order of the prompt. A longer prompt takes several calls, its last blocks first, so
--                  that the blocks dropped first are always those at its end
--
-- {'applied', count}  the target has `count` blocks
-- {'stale', 0}        the target is gone

if redis.call('HEXISTS', KEYS[2], 'publisher:' .. ARGV[1]) == 0 then return {'stale', 0} end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local members = {}
for i = 3, #ARGV do
  members[#members + 1] = string.format('%.0f', now - i) -- a block is older than those before it
  members[#members + 1] = ARGV[i]
end
redis.call('ZADD', KEYS[1], 'GT', unpack(members))
local count = redis.call('ZCARD', KEYS[1])
-- After a change of the capacity several calls share the work.
local over = math.min(count - ARGV[2], 1024)
if over > 0 then
  redis.call('ZREMRANGEBYRANK', KEYS[1], 0, over - 1)
  count = count - over
end
return {'applied', count}
