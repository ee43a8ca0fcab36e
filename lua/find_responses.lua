-- find_responses(kept, due; name*) -> {verdict, value*}
--
-- Find responses that gateways have stored.
--
-- KEYS  kept   hash, PX  the responses; an empty value marks a deletion that MongoDB may not have yet
--       due    zset, PX  their names, by the Redis ms at which each ends
-- ARGV  name*  32 hex digits of each response, at most 1,000
--
-- {'applied', value, ...}  for each name its response; nil if there is none

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local values = {}
for i, name in ipairs(ARGV) do
  local ends = tonumber(redis.call('ZSCORE', KEYS[2], name) or '0')
  values[i] = ends > now and redis.call('HGET', KEYS[1], name)
end
return {'applied', unpack(values)}
