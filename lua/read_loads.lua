-- read_loads(load, changes; since, most, publisher*) -> {verdict, last, loads}
--
-- Read the loads that have changed since a number, so that a reader of many targets need not read all of them each time.
--
-- KEYS  load        hash  the load of each target; `health:<publisher>`: whether it is left out of decisions;
--                         `drift:<publisher>`: how much less it delivers than is expected of it
--       changes     zset  the targets whose loads have changed, each by the number of its last change; `ended`: the last
--                         target that ended, which is in no list of changes
-- ARGV  since       the number of the last change that the caller knows; -1: it knows none
--       most        with more changes than this nothing is read
--       publisher*  targets that are read in any case
--
-- {'applied', last, loads}  `last` is the number of the last change. `loads` are texts, four for each target: publisher,
--                           load, health, drift; one that does not exist is empty
-- {'stale', last}           the caller has to read all loads: it knows too little, or too much has changed

local last = redis.call('ZRANGE', KEYS[2], 0, 0, 'REV', 'WITHSCORES')[2] or '0'
local since, most = ARGV[1], tonumber(ARGV[2])
local ended = redis.call('ZSCORE', KEYS[2], 'ended')
if tonumber(since) < 0 or tonumber(since) > tonumber(last) or (ended and tonumber(ended) > tonumber(since)) then return {'stale', last} end
local names = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. since, '+inf', 'LIMIT', 0, most + 1)
if #names > most then return {'stale', last} end
for i = 3, #ARGV do names[#names + 1] = ARGV[i] end

local loads = {}
for i, name in ipairs(names) do
  local values = redis.call('HMGET', KEYS[1], name, 'health:' .. name, 'drift:' .. name)
  loads[4 * i - 3] = name
  for k = 1, 3 do loads[4 * i - 3 + k] = values[k] or '' end
end
return {'applied', last, loads}
