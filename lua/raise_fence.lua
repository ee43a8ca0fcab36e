-- raise_fence(fence; publisher, token) -> {verdict, counter, holder}
--
-- Shut out every older token of a publisher on one shard, before its new lease holder reads anything there.
--
-- KEYS  fence      hash  the shard's
-- ARGV  publisher  its integer id
--       token      `<counter>.<random>`: the larger counter wins, the same one with another random part loses
--
-- {'applied', counter, holder}  the fence stands at this token; `holder` is the highest holder id seen here
-- {'fenced', counter, holder}   a token with this counter was here before; nothing written

local function counter_of(token) return tonumber(token:match('^%d+')) end

local seen = redis.call('HMGET', KEYS[1], ARGV[1], 'holder')
local holder = tonumber(seen[2] or 0)
if seen[1] and seen[1] ~= ARGV[2] and counter_of(seen[1]) >= counter_of(ARGV[2]) then
  return {'fenced', counter_of(seen[1]), holder}
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return {'applied', counter_of(ARGV[2]), holder}
