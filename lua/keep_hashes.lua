-- keep_hashes(record, fence, hashes, newest, oldest; publisher, token, calls, number, most, milliseconds, entry*) -> {verdict, number, calls}
--
-- Keep which block each engine hash of a group names, in the newest of several generations.
--
-- KEYS  record        hash        the record of the publisher that has reported them
--       fence         hash        the fence of shard 0; `calls:<publisher>`: how many calls of its stream were made here
--       hashes        string, PX  the number of the newest generation; a missing key means 0
--       newest        hash, PX    the generation with that number: engine hash to block
--       oldest        hash, PX    the generation that is deleted when the next one begins
-- ARGV  publisher     its integer id
--       token         the lease token the caller believes is the highest
--       calls         the number of calls that this shard has acknowledged; a shard that has fewer has lost writes
--       number        the number of `newest`, as the caller knows it
--       most          a generation with this many hashes is full, and the next one begins
--       milliseconds  how long a generation lasts if nothing is written into it
--       entry*        engine hash (8 bytes), block: 16 hex of its key, its depth in the piece, 16 hex of its head, and
--                     in a namespace 16 hex of that
--
-- {'applied', number, calls}  written; `number` is the newest generation now. `calls` counts this call
-- {'other', number, calls}    `number` is the newest generation, and not the caller's; nothing written
-- {'fenced', 0, 0}            another worker has the stream, the publisher is gone, or writes are lost; nothing written

if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return {'fenced', 0, 0} end
local name = 'calls:' .. ARGV[1]
local calls = tonumber(redis.call('HGET', KEYS[2], name) or 0) or 0
if calls < tonumber(ARGV[3]) then return {'fenced', 0, 0} end
local newest = tonumber(redis.call('GET', KEYS[3]) or '0') or 0
if newest ~= tonumber(ARGV[4]) then return {'other', newest, calls} end
redis.call('HSET', KEYS[2], name, string.format('%.0f', calls + 1))
for i = 7, #ARGV, 1024 do
  local to = math.min(i + 1023, #ARGV)
  redis.call('HSET', KEYS[4], unpack(ARGV, i, to))
end
local time = redis.call('TIME')
redis.call('PEXPIREAT', KEYS[4], string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[6]))
if redis.call('HLEN', KEYS[4]) >= tonumber(ARGV[5]) then
  newest = newest + 1
  redis.call('UNLINK', KEYS[5])
end
redis.call('SET', KEYS[3], string.format('%.0f', newest), 'PX', ARGV[6])
return {'applied', newest, calls + 1}
