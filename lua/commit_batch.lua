-- commit_batch(record; token, watermark, ts, newest_ts, digest) -> {verdict, watermark}
--
-- Move the watermark of a stream whose blocks lie on several shards, once every shard has answered.
--
-- KEYS  record     hash  the publisher's record
-- ARGV  token      the lease token the caller believes is the highest
--       watermark  seq of the batch
--       ts, newest_ts, digest   kept beside it
--
-- {'applied', watermark}  it is there now
-- {'stale', watermark}    it was there, or further, already; nothing written
-- {'fenced', 0}           somebody else has the stream, or it is gone; nothing written

local state = redis.call('HMGET', KEYS[1], 'token', 'watermark')
if state[1] ~= ARGV[1] then return {'fenced', 0} end
local watermark = tonumber(state[2] or '')
if watermark and watermark >= tonumber(ARGV[2]) then return {'stale', watermark} end

redis.call('HSET', KEYS[1], 'watermark', ARGV[2], 'ts', ARGV[3], 'newest_ts', ARGV[4], 'digest', ARGV[5])
return {'applied', tonumber(ARGV[2])}
