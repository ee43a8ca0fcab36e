-- release(load, changes, reservations, answer_times, books, drift, pulls?; reservation, part, minute, milliseconds, ttft, work, shows, delivered, prompt, completion, drift_max, tpot) -> {verdict, tokens, requests, context, drift}
--
-- End a reservation, or its prefill part, and subtract it from the load of its target; or extend it. Its promise
-- and its outcome are added to the books.
--
-- KEYS  load          hash        the load of each target; `health:<publisher>`: whether it is left out of decisions
--       changes       zset        the targets whose loads have changed, each by the number of its last change
--       reservations  zset        decisions under way, by the Redis ms at which each is over
--       answer_times  string, PX  sums over the requests of this target whose time to the first token is known, and over
--                                 those whose time of each further token is
--       books         hash, PX    the sums of the caller's hour, by minute and target
--       drift         string, PX  the number, and the expected and delivered tokens, of the target's last requests;
--                                 kept for a day from the first of each 25
--       pulls         zset        copies under way from the source of the reservation, if it has one. One ends with the
--                                 prefill, because the blocks are there then
-- ARGV  reservation   the member as `reserve` wrote it. The script also finds it after 'prefill', which sets its tokens
--                     to 0
--       part          'prefill': its tokens are computed; 'ok', 'failed' or 'unanswered': the request has ended; 'renew':
--                     extend it. After 3 'failed' within 10 s without an answer, `reserve` passes the target over for 5 s. It
--                     then lets one request through. If this fails, too, the time doubles, up to 60 s. 'unanswered' says
--                     nothing about the target, because the client left before the answer
--       minute        the caller's clock in minutes; the counts of outcomes are halved every minute
--       milliseconds  with 'renew', how long it lasts from now
--       ttft          ms from the request to its first token; '' if that is not known. Only the first one counts
--       work          prefill tokens that the target had to compute in this time
--       shows         '1': the outcome shows whether the target works; '0': that of another reservation of the request does
--       delivered     with 'ok', prompt tokens that the engine reused; '' if it does not say
--       prompt, completion  the tokens of the prompt and of the answer, as the engine counts them; '' if not known
--       drift_max     the share of what is expected of a target that may be missing; above it `load` gets the field
--                     `drift:<publisher>`
--       tpot          with 'ok', ms of each token after the first one; '' if that is not known
--
-- {'applied', tokens, requests, context, drift}  done; the load of the target is this now. Without numbers: it was
--                                         extended, or the target was unregistered. `drift` is in thousandths, if
--                                         this request has shown that it is above the bound; 0: it has shown that it
--                                         no longer is; else -1
-- {'gone'}                                the reservation does not exist, or has ended; nothing written, except that
--                                         its copy has ended, too

if KEYS[7] then
  local nonce = ARGV[1]:match('^%d+ %d+ %d+ (%x+)')
  if ARGV[2] ~= 'renew' then
    redis.call('ZREM', KEYS[7], nonce)
  elseif redis.call('ZSCORE', KEYS[7], nonce) then
    local time = redis.call('TIME')
    local ends = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[4])
    redis.call('ZADD', KEYS[7], ends, nonce)
    if redis.call('PTTL', KEYS[7]) < tonumber(ARGV[4]) then redis.call('PEXPIREAT', KEYS[7], ends) end
  end
end

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

-- Notes that a load has changed, for `read_loads`. The very first number is the time, so that a new list of changes
-- does not repeat numbers of an earlier one.
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

local publisher, tokens, context, nonce, promise = member:match('^(%d+) (%d+) (%d+) (%x+) ?([%d-]*)')
local field, drift_field = 'health:' .. publisher, 'drift:' .. publisher
local value, health, is_marked = unpack(redis.call('HMGET', KEYS[1], publisher, field, drift_field))
local load = {(value or '0 0 0 0 0 0 0'):match('^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')}
local under_way = tonumber(load[2])
load[1] = math.max(0, load[1] - tokens)
redis.call('ZREM', KEYS[3], member)
if part == 'prefill' then
  local mark = (is_timed or ARGV[5] ~= '') and ' timed' or ''
  local promised = promise ~= '' and ' ' .. promise or ''
  redis.call('ZADD', KEYS[3], due, string.format('%s 0 %s %s%s%s', publisher, context, nonce, promised, mark))
else
  load[2], load[3] = math.max(0, load[2] - 1), math.max(0, load[3] - context)
  local passed = ARGV[3] - load[6]
  for _ = 1, math.min(6, passed) do
    load[4], load[5] = math.floor(load[4] / 2), math.floor(load[5] / 2)
  end
  if passed > 0 or passed < -60 then load[6] = ARGV[3] end -- a clock that was an hour ahead was wrong
  local outcome = ({ok = 4, failed = 5})[part]
  if outcome then load[outcome] = load[outcome] + 1 end
end
-- A target that was unregistered meanwhile has no load, and none is written for it.
if value then
  redis.call('HSET', KEYS[1], publisher, string.format('%d %d %d %d %d %d %d', unpack(load)))
  note(publisher)
end
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
elseif value and health and (part == 'ok' or ARGV[5] ~= '') then
  -- The engine has answered; what its event stream shows stays.
  local away = health:match('%d+$')
  if away == '0' then
    redis.call('HDEL', KEYS[1], field)
  else
    redis.call('HSET', KEYS[1], field, '0 0 0 0 - ' .. away)
  end
end
local is_first, has_further = ARGV[5] ~= '' and not is_timed, part == 'ok' and ARGV[12] ~= ''
if value and (is_first or has_further) then
  local sums = {}
  for number in (redis.call('GET', KEYS[4]) or ''):gmatch('%S+') do sums[#sums + 1] = tonumber(number) end
  -- Sums of 1, work, ms, work squared, and work times ms. Older values count for less, so the sums follow the engine.
  local function add(before, work, ms)
    for i, more in ipairs({1, work, ms, work * work, work * ms}) do
      sums[before + i] = 0.98 * (sums[before + i] or 0) + more
    end
  end
  for i = #sums + 1, 10 do sums[i] = 0 end
  if is_first then add(0, tonumber(ARGV[6]), tonumber(ARGV[5])) end
  if has_further then add(5, under_way, tonumber(ARGV[12])) end
  for i = 1, 10 do sums[i] = string.format('%.12g', sums[i]) end
  redis.call('SET', KEYS[4], table.concat(sums, ' ', 1, 10), 'PX', 3600000)
end

local drift = -1
if promise ~= '' and (part == 'ok' or ARGV[5] ~= '') then
  local is_over, is_told, delivered = part == 'ok', part == 'ok' and ARGV[8] ~= '', tonumber(ARGV[8]) or 0
  local available, device, host, disk, shared, expected, random = 0, 0, 0, 0, 0, 0, 0
  if is_told then
    available, device, host, disk, shared, expected, random =
      promise:match('^(%d+)-(%d+)-(%d+)-(%d+)-(%d+)-(%d+)-(%d+)$')
    expected = tonumber(expected)
  end
  if is_over or is_first then
    local minute = ARGV[3] % 60
    local name = string.format('%d %s', minute, publisher)
    local before = redis.call('HGET', KEYS[5], name)
    if not before and redis.call('HLEN', KEYS[5]) >= 16384 then -- too many targets in this hour: one line for the others
      name = string.format('%d 0', minute)
      before = redis.call('HGET', KEYS[5], name)
    end
    local a, b, c, d, e, f, g, h, i, j, k, l, m, n = (before or '0 0 0 0 0 0 0 0 0 0 0 0 0 0'):match(
      '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
    -- One format of all numbers takes a third of the time of one for each, and %d half of %.0f.
    redis.call('HSET', KEYS[5], name, string.format(
      '%d %d %d %d %d %d %d %d %d %d %d %d %d %d',
      a + (is_over and 1 or 0), b + (is_over and not is_told and 1 or 0), c + available, d + device, e + host, f + disk,
      g + shared, h + expected, i + (is_told and delivered or 0), j + random,
      k + (is_told and tonumber(ARGV[9]) or 0), l + (is_told and tonumber(ARGV[10]) or 0),
      m + (is_first and 1 or 0), n + (is_first and math.floor(ARGV[5] + 0.5) or 0)))
    if not before then redis.call('PEXPIREAT', KEYS[5], string.format('%.0f', ARGV[3] * 60000 + 90000000)) end
  end
  if value and is_told and expected > 0 then
    -- The last 25 to 50 requests, in two parts: the newer one takes the place of the older one when it has 25.
    local before = redis.call('GET', KEYS[6])
    local earlier, promised, came, count, more, got =
      (before or '0 0 0 0 0 0'):match('^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
    count, more, got = count + 1, more + expected, got + math.min(expected, delivered)
    if earlier + count >= 50 and promised + more >= 10000 then
      local lacks, bound = (promised + more - came - got) / (promised + more), tonumber(ARGV[11])
      if lacks > bound or (is_marked and lacks > bound / 2) then
        local time = redis.call('TIME')
        drift = math.max(1, math.floor(1000 * lacks + 0.5))
        -- The drift expires unless it is shown again: a target without credit may get no request that could show what
        -- it has.
        redis.call('HSET', KEYS[1], drift_field, string.format('%.0f %.0f', drift, time[1] * 1000 + 600000))
        earlier, promised, came, count, more, got = 0, 0, 0, 0, 0, 0
      elseif is_marked then
        drift = 0
        redis.call('HDEL', KEYS[1], drift_field)
      end
    end
    if count >= 25 and more >= 5000 then
      earlier, promised, came, count, more, got = count, more, got, 0, 0, 0
    end
    local sums = string.format('%d %d %d %d %d %d', earlier, promised, came, count, more, got)
    if before and count > 1 then -- setting the TTL again would cost as much as the rest of the drift
      redis.call('SET', KEYS[6], sums, 'KEEPTTL')
    else
      redis.call('SET', KEYS[6], sums, 'PX', 86400000)
    end
  end
end
if not value then return {'applied'} end
return {'applied', load[1], tonumber(load[2]), tonumber(load[3]), drift}
