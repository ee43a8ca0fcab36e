-- place(placements, placement*; holder, milliseconds, holders_max) -> {verdict, count}
--
-- Write a placement: an external router has reported that it sent a prompt to a holder. For a time the holder counts as
-- having the blocks of the prompt.
--
-- KEYS  placements  zset  blocks of the group that have placements, by the Redis ms at which the last one ends
--       placement*  hash  one for each block: until which Redis ms each holder counts as having it
-- ARGV  holder        the URL of the holder
--       milliseconds  how long the placement lasts
--       holders_max   the most holders of a block; further ones are left out
--
-- {'applied', count}  `count` blocks of the group have placements now

local TRIMMED_MAX = 256

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ends = string.format('%.0f', now + ARGV[2])
local most = tonumber(ARGV[3])

-- A key lasts as long as the last placement in it; the placements of other callers may last longer than this one.
local function keep(key)
  if redis.call('PTTL', key) < tonumber(ARGV[2]) then redis.call('PEXPIREAT', key, ends) end
end

-- Removes expired holders if a block has too many. Returns whether there is room for one more.
local function has_room(block)
  if redis.call('HLEN', block) < most then return true end
  local fields = redis.call('HGETALL', block)
  for i = 1, #fields, 2 do
    if tonumber(fields[i + 1]) <= now then redis.call('HDEL', block, fields[i]) end
  end
  return redis.call('HLEN', block) < most
end

local over = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, TRIMMED_MAX)
if #over > 0 then redis.call('ZREMRANGEBYRANK', KEYS[1], 0, #over - 1) end

for i = 2, #KEYS do
  if redis.call('HEXISTS', KEYS[i], ARGV[1]) == 1 or has_room(KEYS[i]) then
    redis.call('HSET', KEYS[i], ARGV[1], ends)
    redis.call('ZADD', KEYS[1], 'GT', ends, KEYS[i]:sub(-16))
    keep(KEYS[i])
  end
end
if redis.call('EXISTS', KEYS[1]) == 1 then keep(KEYS[1]) end
return {'applied', redis.call('ZCARD', KEYS[1])}
