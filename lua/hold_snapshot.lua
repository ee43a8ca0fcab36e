-- hold_snapshot(snapshots, asked; holder, milliseconds, pause, most) -> {verdict, milliseconds}
--
-- Take or release one of the places for snapshots, so that all workers together ask few engines at once, and no engine
-- often.
--
-- KEYS  snapshots     zset        the nonces of snapshots under way, with the Redis ms at which the place of each ends
--       asked         string, PX  the nonce of the last snapshot that was asked from this socket
-- ARGV  holder        a random nonce
--       milliseconds  how long the place lasts; 0 releases it
--       pause         for how many ms the socket is not asked again
--       most          how many places there are
--
-- {'applied', 0}        the place is taken, or released
-- {'full', wait}        all places are taken; the first one ends in `wait` ms at the latest; nothing written
-- {'held', wait}        the socket was asked a short time ago, and may be asked again in `wait` ms; nothing written

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if ARGV[2] == '0' then
  redis.call('ZREM', KEYS[1], ARGV[1])
  return {'applied', 0}
end
local last = redis.call('GET', KEYS[2])
if last == ARGV[1] then return {'applied', 0} end
if last then return {'held', math.max(1, redis.call('PTTL', KEYS[2]))} end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[4]) then
  local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
  return {'full', math.max(1, tonumber(first[2]) - now)}
end
redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(ARGV[2])), ARGV[1])
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[3])
return {'applied', 0}
