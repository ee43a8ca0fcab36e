-- new_ids(groups; group, shards, above, publisher_above, hash_seed, format) -> {verdict, group, shards, publisher}
--
-- Return the id of a group and a new publisher id. The first registration of the group assigns the group id.
--
-- KEYS  groups  hash  `["tenant","model"]`: `<group id> <shards>`; `last_group`, `last_publisher`: the last ids;
--               `hash_seed`: the seed of all block hashes in this Redis; `format`: the format of its index
-- ARGV  group   the field
--       shards  the number of shards of a new group; a known group keeps its number
--       above   0; or an id that belongs to another group: if the group has it or a lower one, it gets a higher one
--       publisher_above   the new publisher id is larger than this, an id that belongs to another publisher; or 0
--       hash_seed  the caller's seed; the first one is kept
--       format     the caller's format of the index; the first one is kept
--
-- {'applied', group id, shards, publisher id}  no id is ever assigned twice
-- {'other', 0}  this release cannot read the group's entry, or the index has another format; nothing written

-- A count as a script has written it; nil for any other text.
local function integer(text) return text and #text < 17 and text:match('^%d+$') and tonumber(text) or nil end

-- An id that no Redis with this clock has reached: one id per microsecond (see new_life).
local function first_id()
  local now = redis.call('TIME')
  return math.max(0, (tonumber(now[1]) - 1767225600) * 1000000 + tonumber(now[2]))
end

-- The last id that was assigned. If it cannot be read, it may have been any id below `first_id`.
local function last(field)
  local text = redis.call('HGET', KEYS[1], field)
  return text and (integer(text) or first_id()) or 0
end

if (redis.call('HGET', KEYS[1], 'format') or ARGV[6]) ~= ARGV[6] then return {'other', 0} end
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
