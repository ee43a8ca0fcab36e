-- renew_leases(lease*, record*; milliseconds, token*) -> {verdict, state*}
--
-- Extend the leases of publishers of one group. A lease that ran out is taken again, if no other worker has taken it
-- meanwhile. A dropped lease is not, because it would not be dropped again.
--
-- KEYS  lease*        string, PX  the tokens of the workers that have the leases
--       record*       hash        the records of the same publishers; `worker`: the lease was not dropped; `repair`:
--                                 a repair is requested
-- ARGV  milliseconds  how long the leases last from now
--       token*        the caller's token for each publisher
--
-- {'applied', state*}  for each publisher: 0 if another worker has the stream, the lease was dropped, or the publisher is
--                      gone, and nothing was written; 1 if the caller has the lease; 2 if a repair is asked for, too
-- {'fenced', state*}   the same, and each is 0

local states, count, is_any_held = {}, #KEYS / 2, false
for i = 1, count do
  local held = redis.call('HMGET', KEYS[count + i], 'token', 'repair', 'worker')
  if held[1] ~= ARGV[1 + i] or not held[3] then
    states[i] = 0
  else
    redis.call('SET', KEYS[i], held[1], 'PX', ARGV[1])
    states[i], is_any_held = held[2] and 2 or 1, true
  end
end
if is_any_held then return {'applied', unpack(states)} end
return {'fenced', unpack(states)}
