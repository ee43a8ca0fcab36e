-- end_holder(engine, fence, dead?; holder, is_swept) -> {verdict}
--
-- Begin or end the sweep of a dead holder on one shard. A call of `apply_rows` that was sent before the holder died may
-- arrive at any time after. This script leaves an `applied` that no batch exceeds, by which such a call is refused.
-- Otherwise it would write rows that are never swept.
--
-- KEYS  engine    hash  the dead holder's engine hashes on this shard
--       fence     hash  the fence of the shard; `blocks:<holder>`: see apply_rows
--       dead      set   holder ids still to be swept; only on the shard that has it (shard 0), else absent
-- ARGV  holder    its id
--       is_swept  1 if all its rows are swept, which deletes `engine`; else 0
--
-- {'applied'}  done. A hash that only has `applied` expires after an hour, because no network delivers a call so late
-- {'gone'}     the holder is not in `dead`: it was swept, or this Redis came back empty; or a sweep is to end that this
--              shard has not begun, or has lost in a failover; nothing written

local engine, fence, dead, is_swept = KEYS[1], KEYS[2], KEYS[3], ARGV[2] == '1'
if dead and redis.call('SISMEMBER', dead, ARGV[1]) == 0 then return {'gone'} end

local swept = '9007199254740991 0'
if is_swept then
  if redis.call('HGET', engine, 'applied') ~= swept then return {'gone'} end
  redis.call('UNLINK', engine)
  redis.call('HDEL', fence, 'blocks:' .. ARGV[1])
end
redis.call('PERSIST', engine) -- also if Redis is full: see rule 3
redis.call('HSET', engine, 'applied', swept)
if redis.call('HLEN', engine) == 1 then
  redis.call('PEXPIREAT', engine, string.format('%.0f', (redis.call('TIME')[1] + 3600) * 1000))
end
return {'applied'}
