-- hold_discovery(discovery; worker, milliseconds, state) -> {verdict, 0}
--
-- Take, renew or release the lease of the one ingest worker that discovers engines.
--
-- KEYS  discovery     string, PX  `<worker> <state>` of the worker that discovers
-- ARGV  worker        the caller's name, without blanks
--       milliseconds  how long the lease lasts from now; 0 releases it
--       state         what the caller has found so far, as JSON, for people
--
-- {'applied', 0}  the caller has the lease, or has released it
-- {'fenced', 0}   another worker discovers; nothing written

local held = redis.call('GET', KEYS[1])
if held and string.sub(held, 1, #ARGV[1] + 1) ~= ARGV[1] .. ' ' then return {'fenced', 0} end
if ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[3], 'PX', ARGV[2])
end
return {'applied', 0}
