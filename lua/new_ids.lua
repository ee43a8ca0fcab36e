-- new_ids(groups; group, shards, above, publisher_above, hash_seed) -> {verdict, group, shards, publisher}
--
-- The group id of a (tenant, model), handed out at its first registration, and a new publisher id.
--
-- KEYS  groups  hash  `["tenant","model"]`: `<group id> <shards>`; `last_group`, `last_publisher`: the last ids;
--               `hash_seed`: what all blocks here are hashed with
-- ARGV  group   the field
--       shards  into how many shards a new group is cut; a known one keeps what it has
--       above   0; else the group is given an id anew, larger than this (its old one turned out to be another's)
--       publisher_above   the publisher's id is larger than this (one at or below turned out to be another's)
--       hash_seed  the caller's; the first one stays
--
-- {'applied', group id, shards, publisher id}  no id is ever given twice

redis.call('HSETNX', KEYS[1], 'hash_seed', ARGV[5])
local known = redis.call('HGET', KEYS[1], ARGV[1])
local above = tonumber(ARGV[3])
local id, shards
if known then
  id, shards = known:match('^(%d+) (%d+)$')
  id, shards = tonumber(id), tonumber(shards)
end
if not id or id <= above then
  id = math.max(tonumber(redis.call('HGET', KEYS[1], 'last_group') or 0), above) + 1
  shards = tonumber(ARGV[2])
  redis.call('HSET', KEYS[1], 'last_group', string.format('%.0f', id))
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %.0f', id, shards))
end
local publisher = math.max(tonumber(redis.call('HGET', KEYS[1], 'last_publisher') or 0), tonumber(ARGV[4])) + 1
redis.call('HSET', KEYS[1], 'last_publisher', string.format('%.0f', publisher))
return {'applied', id, shards, publisher}
