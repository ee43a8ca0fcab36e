-- new_ids(groups; group, shards, above, publisher_above, hash_seed, format) -> {verdict, group, shards, publisher}
--
-- Return the group id of a (tenant, model), which its first registration assigns, and a new publisher id.
--
-- KEYS  groups  hash  `["tenant","model"]`: `<group id> <shards>`; `last_group`, `last_publisher`: the last ids;
--               `hash_seed`: what all blocks here are hashed with; `format`: how they are laid out
-- ARGV  group   the field
--       shards  into how many shards a new group is cut; a known one keeps what it has
--       above   0; else the group gets a new id, larger than this, because its former id belongs to another group
--       publisher_above   the publisher's id is larger than this (one at or below turned out to be another's)
--       hash_seed  the caller's seed; the first one is kept
--       format     the caller's layout of the index; the first one is kept
--
-- {'applied', group id, shards, publisher id}  no id is ever given twice
-- {'other', 0}  the group's entry is of a form that this release does not know; nothing written

-- A count as a script has written it, nil for anything else.
local function integer(text) return text and #text < 17 and text:match('^%d+$') and tonumber(text) or nil end

-- What no Redis with this clock has come to, one id a microsecond (new_life).
local function first_id()
  local now = redis.call('TIME')
  return math.max(0, (tonumber(now[1]) - 1767225600) * 1000000 + tonumber(now[2]))
end

-- The last id given out. Where that cannot be read it may be any.
local function last(field)
  local text = redis.call('HGET', KEYS[1], field)
  return text and (integer(text) or first_id()) or 0
end

local known = redis.call('HGET', KEYS[1], ARGV[1])
local above = tonumber(ARGV[3])
local id, shards
if known then
  id, shards = known:match('^(%d+) (%d+)$')
  if not id or #id > 15 or #shards > 4 then return {'other', 0} end
  id, shards = tonumber(id), tonumber(shards)
end
redis.call('HSETNX', KEYS[1], 'hash_seed', ARGV[5])
redis.call('HSETNX', KEYS[1], 'format', ARGV[6])
if not id or id <= above then
  id = math.max(last('last_group'), above) + 1
  shards = tonumber(ARGV[2])
  redis.call('HSET', KEYS[1], 'last_group', string.format('%.0f', id))
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %.0f', id, shards))
end
local publisher = math.max(last('last_publisher'), tonumber(ARGV[4])) + 1
redis.call('HSET', KEYS[1], 'last_publisher', string.format('%.0f', publisher))
return {'applied', id, shards, publisher}
