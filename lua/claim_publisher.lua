-- claim_publisher(publishers, unregistered, changes; publisher, expected, registration, restores, nonce) -> {verdict, 0}
--
-- Write a publisher's registration, if it is still the one that the caller has read.
--
-- KEYS  publishers    hash  `["instance","tenant",rank]`: the registration, JSON
--       unregistered  zset  the publishers that were unregistered last, by Redis time; in the slot of publishers
--       changes       stream  the last changes of publishers, each with the nonce of its call; in their slot
-- ARGV  publisher     the field
--       expected      the value that the caller has read; '' for no value
--       registration  the new value; '' unregisters the publisher
--       restores      '1' if the caller puts back a registration that Redis has lost, else '0'
--       nonce         of this change
--
-- {'applied', 0}  written, or the new value was there already: this call wrote it before, and its reply was lost
-- {'stale', 0}    the field has another value; nothing written
-- {'gone', 0}     with `restores`: the publisher was unregistered in this Redis; nothing written

-- Above this number the oldest unregistered name is dropped.
local MOST = 10000
-- About this many changes are kept. A process that has missed more reads all registrations.
local CHANGES = 1000

local present = redis.call('HGET', KEYS[1], ARGV[1]) or ''
-- Many calls may have removed the field; the last change shows whether it was this one.
if present == ARGV[3] then
  local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)[1]
  if present ~= '' or (last and last[2][2] == ARGV[5]) then return {'applied', 0} end
end
if present ~= ARGV[2] then return {'stale', 0} end
if ARGV[4] == '1' and redis.call('ZSCORE', KEYS[2], ARGV[1]) then return {'gone', 0} end
-- A removal comes first (rule 3), because an unregistered publisher frees memory. The change comes next: at worst,
-- workers that see it read a registration in vain. A registration without a change would be seen late.
redis.call('ZREM', KEYS[2], ARGV[1])
if present ~= ARGV[3] then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', CHANGES, '*', 'nonce', ARGV[5], 'publisher', ARGV[1])
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZADD', KEYS[2], redis.call('TIME')[1], ARGV[1])
  if redis.call('ZCARD', KEYS[2]) > MOST then
    redis.call('ZREM', KEYS[2], redis.call('ZRANGE', KEYS[2], 0, 0)[1])
  end
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
return {'applied', 0}
