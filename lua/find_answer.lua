-- find_answer(answers, kept, due; name) -> {verdict, nonce, value}
--
-- Find an answer that a gateway has kept for a request.
--
-- KEYS  answers  hash      `nonce`: that of the last clearing
--       kept     hash, PX  the answers
--       due      zset, PX  their names, by the Redis ms at which each ends
-- ARGV  name     64 hex digits that identify the request
--
-- {'applied', nonce, value}  the answer
-- {'gone', nonce, ''}        there is none; pass this nonce to keep_answer when the engine has answered

local nonce = redis.call('HGET', KEYS[1], 'nonce') or ''
local ends = tonumber(redis.call('ZSCORE', KEYS[3], ARGV[1]) or '0') or 0
local time = redis.call('TIME')
local value = ends > time[1] * 1000 + math.floor(time[2] / 1000) and redis.call('HGET', KEYS[2], ARGV[1])
if not value then return {'gone', nonce, ''} end
return {'applied', nonce, value}
