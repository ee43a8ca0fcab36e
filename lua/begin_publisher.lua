-- begin_publisher(holders, record; publisher, name, row, group, version, life, target) -> {verdict, 0}
--
-- Write the record and the table row of a claimed publisher; if it has both, write only its target.
--
-- KEYS  holders    hash  the group's holder table; `incarnation` is the version it began with, and never changes
--       record     hash  the publisher's record
-- ARGV  publisher  its integer id
--       name       `["instance","tenant",rank]`, which identifies the record
--       row        the publisher's row, JSON
--       group      `["tenant","model"]`, which identifies the table
--       version    a random nonce
--       life       a random nonce
--       target     its target, JSON; empty if every field has its default
--
-- {'applied', 0}  the publisher has a record, a row and this target
-- {'other', 0}    the table belongs to another group; nothing written
-- {'other', 1}    the record belongs to another publisher; nothing written
-- {'gone', 0}     the publisher has a row and no record, for example because Redis evicts keys: end the publisher
--                 first; nothing written
--
-- The claim was written before this call. Therefore this script removes the mark `unclaimed`: a worker that found the
-- publisher without a claim must look again (end_publisher).
--
-- Ids are assigned in another slot, which may lose the last ones in a failover. A caller that finds an id in use asks
-- for another one.

local group = redis.call('HGET', KEYS[1], 'group')
if group and group ~= ARGV[4] then return {'other', 0} end
local name = redis.call('HGET', KEYS[2], 'name')
if name and name ~= ARGV[2] then return {'other', 1} end
local has_life = redis.call('HEXISTS', KEYS[2], 'life') == 1
local has_row = redis.call('HEXISTS', KEYS[1], 'publisher:' .. ARGV[1]) == 1
if has_row and not has_life then return {'gone', 0} end
redis.call('HDEL', KEYS[2], 'unclaimed')
local field = 'target:' .. ARGV[1]
local begun = has_life and has_row
if begun and (redis.call('HGET', KEYS[1], field) or '') == ARGV[7] then return {'applied', 0} end
if ARGV[7] == '' then
  redis.call('HDEL', KEYS[1], field)
else
  redis.call('HSET', KEYS[1], field, ARGV[7])
end
if begun then
  redis.call('HSET', KEYS[1], 'version', ARGV[5])
  return {'applied', 0}
end
redis.call('HSET', KEYS[2], 'name', ARGV[2], 'life', ARGV[6], 'status', 'starting', 'format', '1')
if not group then redis.call('HSET', KEYS[1], 'incarnation', ARGV[5]) end
redis.call('HSET', KEYS[1], 'group', ARGV[4], 'publisher:' .. ARGV[1], ARGV[3], 'version', ARGV[5])
return {'applied', 0}
