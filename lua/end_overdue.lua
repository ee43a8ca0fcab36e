-- end_overdue(load, reservations; most) -> {verdict, ended, now}
--
-- Release overdue reservations, so that the loads of an idle group are right, too.
--
-- KEYS  load          hash  the load of each target
--       reservations  zset  decisions under way, by the Redis ms at which each is over
-- ARGV  most          the most reservations that one call ends
--
-- {'applied', ended, now}  `ended` reservations were overdue; if it equals `most`, there may be more. `now` is the clock
--                          of Redis in ms

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local overdue = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, ARGV[1])
for _, reservation in ipairs(overdue) do
  local publisher, tokens, context = reservation:match('^(%d+) (%d+) (%d+)')
  local value = redis.call('HGET', KEYS[1], publisher)
  if value then
    local load = {}
    for number in value:gmatch('%d+') do load[#load + 1] = tonumber(number) end
    load[1], load[2], load[3] = math.max(0, load[1] - tokens), math.max(0, load[2] - 1), math.max(0, load[3] - context)
    redis.call('HSET', KEYS[1], publisher, string.format('%.0f %.0f %.0f %.0f %.0f %.0f %.0f', unpack(load)))
  end
  redis.call('ZREM', KEYS[2], reservation)
end
return {'applied', #overdue, now}
