-- end_responses(responses, due, copied, queue; group, entry*) -> {verdict, 0}
--
-- Remove entries from the queue after their responses were copied to MongoDB. If the last change of a response is among
-- them, the response may be removed later to make room.
--
-- KEYS  responses  hash, PX  under the name of a response: its last change, if MongoDB does not have it yet
--       due        zset, PX  the names of all responses, by the Redis ms at which each ends
--       copied     zset, PX  the names of those that MongoDB has, likewise
--       queue      stream    names of responses
-- ARGV  group      the consumer group
--       entry*     id of the entry, name of the response; at most 1,000 entries
--
-- {'applied', 0}  removed

for i = 2, #ARGV, 2 do
  local id, name = ARGV[i], ARGV[i + 1]
  redis.call('XACK', KEYS[4], ARGV[1], id)
  redis.call('XDEL', KEYS[4], id)
  if redis.call('HGET', KEYS[1], name) == id then
    redis.call('HDEL', KEYS[1], name)
    local ends = redis.call('ZSCORE', KEYS[2], name)
    if ends then redis.call('ZADD', KEYS[3], ends, name) end
  end
end
local left = redis.call('PTTL', KEYS[2])
if left > 0 then
  local time = redis.call('TIME')
  redis.call('PEXPIREAT', KEYS[3], string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + left))
end
return {'applied', 0}
