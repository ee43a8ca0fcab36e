-- begin_publisher(holders, record; publisher, row, group, version, life) -> {verdict, 0}
--
-- Give a claimed publisher its record and its row in the group's table; nothing where it has them.
--
-- KEYS  holders    hash  the group's holder table
--       record     hash  the publisher's record
-- ARGV  publisher  its integer id
--       row        what readers are told of it, JSON
--       group      `["tenant","model"]`, to know the table by
--       version    a random word
--       life       a random word
--
-- {'applied', 0}  it has them
-- {'other', 0}    the table is of another group; nothing written

local group = redis.call('HGET', KEYS[1], 'group')
if group and group ~= ARGV[3] then return {'other', 0} end
if redis.call('HGET', KEYS[2], 'life') and redis.call('HEXISTS', KEYS[1], 'publisher:' .. ARGV[1]) == 1 then
  return {'applied', 0}
end
redis.call('HSET', KEYS[2], 'life', ARGV[5], 'status', 'pending')
redis.call('HSET', KEYS[1], 'group', ARGV[3], 'publisher:' .. ARGV[1], ARGV[2], 'version', ARGV[4])
return {'applied', 0}
