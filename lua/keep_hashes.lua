-- keep_hashes(hashes, newest, oldest; number, most, milliseconds, entry*) -> {verdict, number}
--
-- Keep which blocks the engine hashes of a group stand for, in the newest of several generations.
--
-- KEYS  hashes        string, PX  the number of the newest generation; none is 0
--       newest        hash, PX    the generation of that number: engine hash to block
--       oldest        hash, PX    the generation that ends when the next one begins
-- ARGV  number        of `newest`, as the caller believes
--       most          how many hashes a generation has; with more, the next one begins
--       milliseconds  how long what is kept stays if nothing is written
--       entry*        engine hash (8 bytes), block: 16 hex of its key, its depth in the piece, 16 hex of its head, and
--                     in a namespace 16 hex of that
--
-- {'applied', number}  written; the newest generation is now this one
-- {'other', number}    the newest generation is this one; nothing written

local newest = tonumber(redis.call('GET', KEYS[1]) or '0') or 0
if newest ~= tonumber(ARGV[1]) then return {'other', newest} end
for i = 4, #ARGV, 1024 do
  local to = math.min(i + 1023, #ARGV)
  redis.call('HSET', KEYS[2], unpack(ARGV, i, to))
end
local time = redis.call('TIME')
redis.call('PEXPIREAT', KEYS[2], string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3]))
if redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[2]) then
  newest = newest + 1
  redis.call('UNLINK', KEYS[3])
end
redis.call('SET', KEYS[1], string.format('%.0f', newest), 'PX', ARGV[3])
return {'applied', newest}
