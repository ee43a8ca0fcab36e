-- note_health(load, record; publisher, token, milliseconds) -> {verdict}
--
-- Note whether the event stream of a publisher shows that its engine cannot be reached. Whoever chooses a target leaves
-- such an engine out.
--
-- KEYS  load          hash  the load of each target; `health:<publisher>`: whether it is left out of decisions
--       record        hash  the publisher's record
-- ARGV  publisher     its integer id
--       token         the lease token the caller believes is the highest
--       milliseconds  how long this counts, so that the note of a worker that has died ends; '0': the engine is reached.
--                     This also ends what failed requests have shown before
--
-- {'applied'}  noted
-- {'fenced'}   another worker has the stream, or the publisher is gone; nothing written

if redis.call('HGET', KEYS[2], 'token') ~= ARGV[2] then return {'fenced'} end
local field = 'health:' .. ARGV[1]
if ARGV[3] == '0' then
  redis.call('HDEL', KEYS[1], field)
else
  local time = redis.call('TIME')
  local away = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3]
  local failures = (redis.call('HGET', KEYS[1], field) or '0 0 0 0 - 0'):gsub('%d+$', '')
  redis.call('HSET', KEYS[1], field, failures .. string.format('%.0f', away))
end
return {'applied'}
