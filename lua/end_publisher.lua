-- end_publisher(holders, record, lease, dead, load, changes, entries, history; publisher, token, version, only, holder*) -> {verdict, ended}
--
-- End a publisher: delete its row and all its holders from the table in one step. The fence was raised before.
--
-- KEYS  holders    hash        the group's holder table
--       record     hash        the publisher's record
--       lease      string, PX  the token of the worker that applies its stream
--       dead       set         holder ids whose blocks are still to be swept
--       load       hash        the load of each target
--       changes    zset        the targets whose loads have changed, each by the number of its last change; `ended`: the
--                              last of those that ended
--       entries    hash        how many blocks each publisher has, and their sum; deleted with the last publisher
--       history       zset        blocks of prompts that went to the target
-- ARGV  publisher  its integer id
--       token      the token under which the fence was raised
--       version    a random nonce
--       only       'unclaimed' ends it only if begin_publisher has not removed its mark `unclaimed`; 'gone' ends it
--                  only if it has no record, and ignores the token; '' ends it in any case
--       holder*    with 'gone', the publisher's holders in the table, since no record names them
--
-- {'applied', ended}  `ended` holders ended
-- {'fenced', 0}       another process ended the publisher, or is about to; nothing written
-- {'stale', 0}        with `only`: it may have a claim now, or has a record; nothing written

local fields = redis.call('HGETALL', KEYS[2])
local ids, token, unclaimed, life = {}, nil, false, nil
for i = 1, #fields, 2 do
  local beginning = fields[i]:sub(1, 7)
  if beginning == 'holder:' or beginning == 'staged:' then ids[#ids + 1] = fields[i + 1] end
  if fields[i] == 'token' then token = fields[i + 1] end
  if fields[i] == 'unclaimed' then unclaimed = true end
  if fields[i] == 'life' then life = fields[i + 1] end
end
if ARGV[4] == 'gone' then
  if life then return {'stale', 0} end
  for i = 5, #ARGV do ids[#ids + 1] = ARGV[i] end
else
  if token ~= ARGV[2] then return {'fenced', 0} end
  if ARGV[4] == 'unclaimed' and not unclaimed then return {'stale', 0} end
end

redis.call('HDEL', KEYS[1], 'publisher:' .. ARGV[1], 'target:' .. ARGV[1])
for _, id in ipairs(ids) do -- one by one: a standard publisher may have more holders than `unpack` can return
  redis.call('SADD', KEYS[4], id)
  redis.call('HDEL', KEYS[1], id)
end
redis.call('HSET', KEYS[1], 'version', ARGV[3])
redis.call('HDEL', KEYS[5], ARGV[1], 'health:' .. ARGV[1], 'drift:' .. ARGV[1])
redis.call('ZREM', KEYS[6], ARGV[1])
local last = redis.call('ZRANGE', KEYS[6], 0, 0, 'REV', 'WITHSCORES')[2]
if last and redis.call('EXISTS', KEYS[5]) == 1 then
  -- A replica that has read the loads before reads all of them again, and finds this one gone.
  redis.call('ZADD', KEYS[6], string.format('%.0f', last + 1), 'ended')
else
  redis.call('DEL', KEYS[6])
end
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('UNLINK', KEYS[8])
local noted = redis.call('HGET', KEYS[7], ARGV[1])
if noted then
  redis.call('HDEL', KEYS[7], ARGV[1])
  local marks, about = 0, redis.call('HMGET', KEYS[7], 'total', 'cut', 'turn')
  for i = 1, 3 do marks = marks + (about[i] and 1 or 0) end
  local left = (tonumber(about[1] or 0) or 0) - (tonumber(noted:match('^%d+') or 0) or 0)
  redis.call('HSET', KEYS[7], 'total', string.format('%.0f', math.max(0, left)))
  if redis.call('HLEN', KEYS[7]) <= marks then redis.call('DEL', KEYS[7]) end
end
return {'applied', #ids}
