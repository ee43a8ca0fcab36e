-- keep_worth(valuing, worth; walk, milliseconds, keep, value) -> {verdict, wait}
--
-- Begin, continue or end a walk over the rows of a group, which computes the worth of its caches. Only one runs at a time.
--
-- KEYS  valuing       string, PX  the nonce of the walk under way, or of the last one until the next may begin
--       worth         string, PX  the result of the last walk
-- ARGV  walk          the nonce of the caller's walk
--       milliseconds  for how long no other walk may begin
--       keep          for how many ms `value` is kept
--       value         the result of the walk, as JSON; empty before its end
--
-- {'applied', 0}  the walk may continue, or its result is kept
-- {'held', wait}  there is another walk, or the last one ended a short time ago; the next may begin in `wait` ms

local walk = redis.call('GET', KEYS[1])
if walk and walk ~= ARGV[1] then return {'held', math.max(1, redis.call('PTTL', KEYS[1]))} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if ARGV[4] ~= '' then redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[3]) end
return {'applied', 0}
