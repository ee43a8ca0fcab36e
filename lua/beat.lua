-- beat(workers; worker, keep_seconds, leaving) -> {verdict, worker*}
--
-- Report that an ingest worker is alive, by the clock of Redis, and return all live workers.
--
-- KEYS  workers       zset  worker id, scored by the Redis time of its last heartbeat, in seconds
-- ARGV  worker        the worker that is alive, and after a slash how many streams it takes; '' only asks for the live workers
--       keep_seconds  workers without a heartbeat for longer are removed
--       leaving       '1': this worker is removed now
--
-- {'applied', worker*}  the live workers

local now = tonumber(redis.call('TIME')[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
-- A score in the future comes from a clock that was ahead. Its worker would count as alive forever, and no worker would
-- run its share of the streams.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. (now + tonumber(ARGV[2])), '+inf')
if ARGV[3] == '1' then
  redis.call('ZREM', KEYS[1], ARGV[1])
elseif ARGV[1] ~= '' then
  redis.call('ZADD', KEYS[1], now, ARGV[1])
end
return {'applied', unpack(redis.call('ZRANGE', KEYS[1], 0, 4095))}
