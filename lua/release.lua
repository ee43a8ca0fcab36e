-- release(load, changes, reservations, first_tokens; reservation, part, minute, milliseconds, ttft, work, shows) -> {verdict, tokens, requests, context}
--
-- End a reservation, or its prefill part, and subtract it from the load of its target; or extend it.
--
-- KEYS  load          hash        the load of each target; `health:<publisher>`: whether it is left out of decisions
--       changes       zset        the targets whose loads have changed, each by the number of its last change
--       reservations  zset        decisions under way, by the Redis ms at which each is over
--       first_tokens  string, PX  sums over the requests of this target whose time to the first token is known
-- ARGV  reservation   the member as `reserve` wrote it. The script also finds it after 'prefill', which sets its tokens
--                     to 0
--       part          'prefill': its tokens are computed; 'ok' or 'failed': the request has ended; 'renew': extend it.
--                     After 3 'failed' within 10 s, and nothing else, `reserve` passes the target over for 5 s. It then
--                     lets one request through. If this fails, too, the time doubles, up to 60 s
--       minute        the caller's clock in minutes; the counts of outcomes are halved every minute
--       milliseconds  with 'renew', how long it lasts from now
--       ttft          ms from the request to its first token; '' if that is not known. Only the first one counts
--       work          prefill tokens that the target had to compute in this time
--       shows         '1': the outcome shows whether the target lives; '0': another reservation of the same request does
--
-- {'applied', tokens, requests, context}  done; the load of the target is this now. Without it: the reservation was
--                                         extended, or the target was unregistered
-- {'gone'}                                the reservation does not exist, or has ended; nothing written

local member = ARGV[1]
local due = redis.call('ZSCORE', KEYS[3], member)
if not due then -- its prefill was released before
  member = ARGV[1]:gsub('^(%d+) %d+ ', '%1 0 ', 1)
  due = redis.call('ZSCORE', KEYS[3], member)
end
local is_timed = false
if not due then -- and its time to the first token was counted
  member, is_timed = member .. ' timed', true
  due = redis.call('ZSCORE', KEYS[3], member)
end
if not due then return {'gone'} end

-- Notes that a load has changed, for `read_loads`. The first number of all is the time, so that no log that comes after
-- another one gives a number twice.
local function note(name)
  local last = redis.call('ZRANGE', KEYS[2], 0, 0, 'REV', 'WITHSCORES')[2]
  if not last then
    local begun = redis.call('TIME')
    last = begun[1] * 1000000 + begun[2]
  end
  redis.call('ZADD', KEYS[2], string.format('%.0f', last + 1), name)
end

local part = ARGV[2]
if part == 'renew' then
  local time = redis.call('TIME')
  redis.call('ZADD', KEYS[3], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[4], member)
  return {'applied'}
end

local publisher, tokens, context, nonce = member:match('^(%d+) (%d+) (%d+) (%x+)')
local field = 'health:' .. publisher
local value = redis.call('HGET', KEYS[1], publisher)
local load = {}
for number in (value or '0 0 0 0 0 0 0'):gmatch('%d+') do load[#load + 1] = tonumber(number) end
load[1] = math.max(0, load[1] - tokens)
redis.call('ZREM', KEYS[3], member)
if part == 'prefill' then
  local mark = (is_timed or ARGV[5] ~= '') and ' timed' or ''
  redis.call('ZADD', KEYS[3], due, string.format('%s 0 %s %s%s', publisher, context, nonce, mark))
else
  load[2], load[3] = math.max(0, load[2] - 1), math.max(0, load[3] - context)
  for _ = 1, math.min(6, ARGV[3] - load[6]) do
    load[4], load[5] = math.floor(load[4] / 2), math.floor(load[5] / 2)
  end
  load[6] = math.max(load[6], tonumber(ARGV[3]))
  local outcome = part == 'ok' and 4 or 5
  load[outcome] = load[outcome] + 1
end
-- A target that was unregistered meanwhile has no load, and none is written for it.
if value then
  redis.call('HSET', KEYS[1], publisher, string.format('%.0f %.0f %.0f %.0f %.0f %.0f %.0f', unpack(load)))
  note(publisher)
end
local health = value and redis.call('HGET', KEYS[1], field)
if value and part == 'failed' and ARGV[7] == '1' then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local first, second, over, pause, probe, away = (health or '0 0 0 0 - 0'):match('^(%d+) (%d+) (%d+) (%d+) (%S+) (%d+)$')
  if tonumber(over) > 0 then
    -- The requests that were sent before it was left out say nothing new.
    if probe == nonce then
      pause, probe = math.min(2 * pause, 60000), '-'
      over = now + pause
    end
  elseif now - first <= 10000 then
    over, pause = now + 5000, 5000
  else
    first, second = second, now
  end
  redis.call('HSET', KEYS[1], field, string.format('%.0f %.0f %.0f %.0f %s %s', first, second, over, pause, probe, away))
elseif health and (part == 'ok' or ARGV[5] ~= '') then
  -- The engine has answered; what its event stream shows stays.
  local away = health:match('%d+$')
  if away == '0' then
    redis.call('HDEL', KEYS[1], field)
  else
    redis.call('HSET', KEYS[1], field, '0 0 0 0 - ' .. away)
  end
end
if value and ARGV[5] ~= '' and not is_timed then
  -- Sums of 1, work, ms, work squared, and work times ms. Older values count for less, so the sums follow the engine.
  local work, ms, sums = tonumber(ARGV[6]), tonumber(ARGV[5]), {}
  for number in (redis.call('GET', KEYS[4]) or ''):gmatch('%S+') do sums[#sums + 1] = tonumber(number) end
  for i, more in ipairs({1, work, ms, work * work, work * ms}) do
    sums[i] = string.format('%.12g', 0.98 * (sums[i] or 0) + more)
  end
  redis.call('SET', KEYS[4], table.concat(sums, ' ', 1, 5), 'PX', 3600000)
end
if not value then return {'applied'} end
return {'applied', load[1], load[2], load[3]}
