-- end_overdue(load, changes, reservations; most) -> {verdict, ended, now}
--
-- Release overdue reservations, so that the loads of an idle group are right, too.
--
-- KEYS  load          hash  the load of each target
--       changes       zset  the targets whose loads have changed, each by the number of its last change
--       reservations  zset  decisions under way, by the Redis ms at which each is over
-- ARGV  most          the most reservations to end
--
-- {'applied', ended, now}  `ended` reservations were overdue; if it equals `most`, there may be more. `now` is the clock
--                          of Redis in ms

-- Notes that a load has changed, for `read_loads`. The very first number is the time, so that a new list of changes
-- does not repeat numbers of an earlier one.
local function note(name)
  local last = redis.call('ZRANGE', KEYS[2], 0, 0, 'REV', 'WITHSCORES')[2]
  if not last then
    local begun = redis.call('TIME')
    last = begun[1] * 1000000 + begun[2]
  end
  redis.call('ZADD', KEYS[2], string.format('%.0f', last + 1), name)
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local overdue = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, ARGV[1])
for _, reservation in ipairs(overdue) do
  local publisher, tokens, context = reservation:match('^(%d+) (%d+) (%d+)')
  local value = redis.call('HGET', KEYS[1], publisher)
  if value then
    local load = {}
    for number in value:gmatch('%d+') do load[#load + 1] = tonumber(number) end
    load[1], load[2], load[3] = math.max(0, load[1] - tokens), math.max(0, load[2] - 1), math.max(0, load[3] - context)
    redis.call('HSET', KEYS[1], publisher, string.format('%.0f %.0f %.0f %.0f %.0f %.0f %.0f', unpack(load)))
    note(publisher)
  end
  redis.call('ZREM', KEYS[3], reservation)
end
return {'applied', #overdue, now}
