-- clear_answers(answers, kept, due; nonce) -> {verdict, count}
--
-- Remove every answer. An answer whose request began before this call is not kept afterwards.
--
-- KEYS  answers  hash      `nonce`: that of the last clearing; `cleared`: how many answers it removed; `bytes`
--       kept     hash, PX  the answers
--       due      zset, PX  their names, by the Redis ms at which each ends
-- ARGV  nonce    64 random bits of this clearing, 16 hex digits
--
-- {'applied', count}   `count` answers were removed
-- {'repeated', count}  the same call removed them before

if redis.call('HGET', KEYS[1], 'nonce') == ARGV[1] then
  return {'repeated', tonumber(redis.call('HGET', KEYS[1], 'cleared') or '0')}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local count = redis.call('ZCOUNT', KEYS[3], string.format('(%.0f', now), '+inf')
redis.call('UNLINK', KEYS[2], KEYS[3])
redis.call('HSET', KEYS[1], 'nonce', ARGV[1], 'cleared', count, 'bytes', '0')
return {'applied', count}
