-- clear_answers(answers, kept, due; nonce, name) -> {verdict, count}
--
-- Remove one answer, or every answer. No answer whose request began before this call is kept afterwards.
--
-- KEYS  answers  hash      `nonce`: that of the last clearing; `cleared`: how many answers it removed; `bytes`
--       kept     hash, PX  the answers
--       due      zset, PX  their names, by the Redis ms at which each ends
-- ARGV  nonce    64 random bits of this clearing, 16 hex digits
--       name     64 hex digits that identify the request of the answer; empty for all
--
-- {'applied', count}   `count` answers were removed
-- {'repeated', count}  the same call removed them before

-- As in keep_answer.
local ENTRY_BYTES = 512

if redis.call('HGET', KEYS[1], 'nonce') == ARGV[1] then
  return {'repeated', tonumber(redis.call('HGET', KEYS[1], 'cleared') or '0')}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local live, count, bytes = string.format('(%.0f', now), 0, 0
if ARGV[2] == '' then
  count = redis.call('ZCOUNT', KEYS[3], live, '+inf')
  redis.call('UNLINK', KEYS[2], KEYS[3])
else
  local size = redis.call('HSTRLEN', KEYS[2], ARGV[2])
  bytes = tonumber(redis.call('HGET', KEYS[1], 'bytes') or '0')
  if redis.call('HDEL', KEYS[2], ARGV[2]) == 1 then bytes = math.max(0, bytes - size - ENTRY_BYTES) end
  if (tonumber(redis.call('ZSCORE', KEYS[3], ARGV[2]) or '0') or 0) > now then count = 1 end
  redis.call('ZREM', KEYS[3], ARGV[2])
end
redis.call('HSET', KEYS[1], 'nonce', ARGV[1], 'cleared', count, 'bytes', string.format('%.0f', bytes))
return {'applied', count}
