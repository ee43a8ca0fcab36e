-- find_answer(answers, kept, due; name) -> {verdict, word, value}
--
-- Find an answer that a gateway has kept for a request.
--
-- KEYS  answers  hash      `word`: which clearing was the last
--       kept     hash, PX  the answers
--       due      zset, PX  their names, by the Redis ms at which each ends
-- ARGV  name     64 hex digits that identify the request
--
-- {'applied', word, value}  the answer
-- {'gone', word, ''}        there is none; one that is made from now on is kept under this word

local word = redis.call('HGET', KEYS[1], 'word') or ''
local ends = tonumber(redis.call('ZSCORE', KEYS[3], ARGV[1]) or '0') or 0
local time = redis.call('TIME')
local value = ends > time[1] * 1000 + math.floor(time[2] / 1000) and redis.call('HGET', KEYS[2], ARGV[1])
if not value then return {'gone', word, ''} end
return {'applied', word, value}
