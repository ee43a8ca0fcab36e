-- commit_batch(record, fence; publisher, token, calls, watermark, ts, newest_ts, digest, shards, event*) -> {verdict, watermark, calls}
--
-- Move the watermark of a stream, and the event_ids of its batches. The caller applied the blocks on several shards
-- before, and every shard has acknowledged them.
--
-- KEYS  record     hash  the publisher's record
--       fence      hash  of its shard, shard 0; `calls:<publisher>`: how many calls of its stream were made here
-- ARGV  publisher  its integer id
--       token      the lease token the caller believes is the highest
--       calls      the number of calls that this shard has acknowledged; a shard that has fewer has lost writes
--       watermark  seq of the batch; '' where the stream keeps none, and only event_ids move
--       ts, newest_ts, digest   kept beside it
--       shards     how many shards have got blocks since the last commit; then for each: its number, and how many
--                  calls it has acknowledged. A takeover finds a shard that has lost writes by it
--       event*     holder id, event_id
--
-- {'applied', watermark, calls}  it is there now; 0 where none was given. `calls` counts this one
-- {'stale', watermark, calls}    it was there, or further, already; nothing written
-- {'fenced', 0}                  somebody else has the stream, it is gone, or has lost writes; nothing written

local state = redis.call('HMGET', KEYS[1], 'token', 'watermark')
if state[1] ~= ARGV[2] then return {'fenced', 0} end
local name = 'calls:' .. ARGV[1]
local calls = tonumber(redis.call('HGET', KEYS[2], name) or 0) or 0
if calls < tonumber(ARGV[3]) then return {'fenced', 0} end
local watermark = tonumber(state[2] or '')
local commit = tonumber(ARGV[4])
if watermark and commit and watermark >= commit then return {'stale', watermark, calls} end

redis.call('HSET', KEYS[2], name, string.format('%.0f', calls + 1))
local last_shard = 8 + 2 * tonumber(ARGV[8])
for i = 9, last_shard, 2 do redis.call('HSET', KEYS[1], 'shard:' .. ARGV[i], ARGV[i + 1]) end
for i = last_shard + 1, #ARGV, 2 do redis.call('HSET', KEYS[1], 'event:' .. ARGV[i], ARGV[i + 1]) end
if not commit then return {'applied', 0, calls + 1} end
redis.call('HSET', KEYS[1], 'watermark', ARGV[4], 'ts', ARGV[5], 'newest_ts', ARGV[6], 'digest', ARGV[7])
return {'applied', commit, calls + 1}
