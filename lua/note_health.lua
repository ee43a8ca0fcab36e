-- note_health(load, changes, record; publisher, token, milliseconds) -> {verdict}
--
-- Note whether the event stream of a publisher shows that its engine cannot be reached. Whoever chooses a target leaves
-- such an engine out.
--
-- KEYS  load          hash  the load of each target; `health:<publisher>`: whether it is left out of decisions
--       changes       zset  the targets whose loads have changed, each by the number of its last change
--       record        hash  the publisher's record
-- ARGV  publisher     its integer id
--       token         the lease token the caller believes is the highest
--       milliseconds  how long this counts, so that the note of a worker that has died ends; '0': the engine is reached.
--                     This also ends what failed requests have shown before
--
-- {'applied'}  noted
-- {'fenced'}   another worker has the stream, or the publisher is gone; nothing written

-- Notes that a load has changed, for `read_loads`. The first number of all is the time, so that no log that comes after
-- another one gives a number twice.
local function note(name)
  local last = redis.call('ZRANGE', KEYS[2], 0, 0, 'REV', 'WITHSCORES')[2]
  if not last then
    local begun = redis.call('TIME')
    last = begun[1] * 1000000 + begun[2]
  end
  redis.call('ZADD', KEYS[2], string.format('%.0f', last + 1), name)
end

if redis.call('HGET', KEYS[3], 'token') ~= ARGV[2] then return {'fenced'} end
local field = 'health:' .. ARGV[1]
if ARGV[3] == '0' then
  redis.call('HDEL', KEYS[1], field)
else
  local time = redis.call('TIME')
  local away = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3]
  local failures = (redis.call('HGET', KEYS[1], field) or '0 0 0 0 - 0'):gsub('%d+$', '')
  redis.call('HSET', KEYS[1], field, failures .. string.format('%.0f', away))
end
note(ARGV[1])
return {'applied'}
