-- keep_ids(groups; group, id, shards, publisher) -> {verdict, id}
--
-- Say again which ids a registration has, where a failover has forgotten that they were handed out.
--
-- KEYS  groups     hash  `["tenant","model"]`: `<group id> <shards>`; `last_group`, `last_publisher`: the last ids
-- ARGV  group      the field
--       id, shards the group's
--       publisher  the publisher's id
--
-- {'applied', id}  they are known
-- {'other', id}    the group has been given this other id meanwhile; nothing written

local known = redis.call('HGET', KEYS[1], ARGV[1])
local id = known and known:match('^%d+') or ARGV[2]
if id ~= ARGV[2] then return {'other', tonumber(id)} end

local last = redis.call('HMGET', KEYS[1], 'last_group', 'last_publisher')
local highest = math.max(tonumber(last[1] or 0), tonumber(ARGV[2]))
local publisher = math.max(tonumber(last[2] or 0), tonumber(ARGV[4]))
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
redis.call('HSET', KEYS[1], 'last_group', string.format('%.0f', highest))
redis.call('HSET', KEYS[1], 'last_publisher', string.format('%.0f', publisher))
return {'applied', highest}
