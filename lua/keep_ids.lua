-- keep_ids(groups; group, id, shards, publisher, format) -> {verdict, id}
--
-- Write the ids of a registration again, after a failover that has lost them.
--
-- KEYS  groups     hash  `["tenant","model"]`: `<group id> <shards>`; `last_group`, `last_publisher`: the last ids
-- ARGV  group      the field
--       id, shards the group's
--       publisher  the publisher's id
--       format     the caller's format of the index
--
-- {'applied', id}  Redis has the ids
-- {'other', id}    the group has another id by now; 0 if this release cannot read the group's entry, or if the index
--                  has another format. Nothing written

if (redis.call('HGET', KEYS[1], 'format') or ARGV[5]) ~= ARGV[5] then return {'other', 0} end
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known and not known:match('^%d+ %d+$') then return {'other', 0} end
local id = known and known:match('^%d+') or ARGV[2]
if id ~= ARGV[2] then return {'other', tonumber(id)} end

local last = redis.call('HMGET', KEYS[1], 'last_group', 'last_publisher')
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
redis.call('HSETNX', KEYS[1], 'format', ARGV[5])
for i, field in ipairs({'last_group', 'last_publisher'}) do
  local given = ARGV[2 * i]
  local known_last = last[i] or '0'
  -- A last id that cannot be read is not changed: the next new ids begin far above it.
  if known_last:match('^%d+$') and tonumber(known_last) < tonumber(given) then
    redis.call('HSET', KEYS[1], field, given)
  end
end
return {'applied', tonumber(ARGV[2])}
