{{/*
The pod of a role. Roles differ in the argument, in the variable of the port, and in the file of publishers.
Called with root, role, and values, which are the role's.
*/}}
{{- define "waymark.pod" -}}
{{- $root := .root }}
{{- $redis := .root.Values.redis }}
{{- $fullname := include "waymark.fullname" .root }}
{{- $files := list }}
{{- range $name, $secret := dict "redis-password" $redis.passwordSecret "redis-sentinel-password" $redis.sentinelPasswordSecret }}
{{- if $secret.name }}
{{- $source := dict "secret" (dict "secretName" $secret.name "items" (list (dict "key" $secret.key "path" "password"))) }}
{{- $files = append $files (dict "name" $name "path" (printf "/etc/waymark/%s" $name) "source" $source) }}
{{- end }}
{{- end }}
{{- if $redis.tlsSecret.name }}
{{- $files = append $files (dict "name" "redis-tls" "path" "/etc/waymark/redis-tls" "source" (dict "secret" (dict "secretName" $redis.tlsSecret.name))) }}
{{- end }}
{{- $isPicker := eq .role "epp" }}
{{- $isGateway := eq .role "gateway" }}
{{- $apiTokens := $root.Values.apiTokensSecret }}
{{- if and $apiTokens.name (or (eq .role "query") $isGateway) }}
{{- $files = append $files (dict "name" "api-tokens" "path" "/etc/waymark/api-tokens" "source" (dict "secret" (dict "secretName" $apiTokens.name))) }}
{{- end }}
{{- $engineCa := $root.Values.engineCaSecret }}
{{- if $engineCa.name }}
{{- $files = append $files (dict "name" "engine-ca" "path" "/etc/waymark/engine-ca" "source" (dict "secret" (dict "secretName" $engineCa.name))) }}
{{- end }}
{{- $hasKeys := and $isGateway $root.Values.gateway.keysSecret.name }}
{{- if $hasKeys }}
{{- $files = append $files (dict "name" "gateway-keys" "path" "/etc/waymark/gateway-keys" "source" (dict "secret" (dict "secretName" $root.Values.gateway.keysSecret.name))) }}
{{- end }}
{{- $certificate := dict }}
{{- if $isPicker }}
{{- with .values.certSecret.name }}
{{- $certificate = $root.Values.epp.certSecret }}
{{- $files = append $files (dict "name" "certificate" "path" "/etc/waymark/certificate" "source" (dict "secret" (dict "secretName" .))) }}
{{- end }}
{{- end }}
{{- $publishersKey := "publishers.yaml" }}
{{- $hasPublishers := and (eq .role "ingest") (or .root.Values.publishers .root.Values.publishersConfigMap.name) }}
{{- if $hasPublishers }}
{{- $name := printf "%s-publishers" $fullname }}
{{- with .root.Values.publishersConfigMap }}
{{- if .name }}{{ $name = .name }}{{ $publishersKey = .key }}{{ end }}
{{- end }}
{{- $files = append $files (dict "name" "publishers" "path" "/etc/waymark/publishers" "source" (dict "configMap" (dict "name" $name))) }}
{{- end }}
metadata:
  annotations:
    checksum/config: {{ printf "%s%s" (include (print $root.Template.BasePath "/configmap.yaml") $root) (include (print $root.Template.BasePath "/secret.yaml") $root) | sha256sum }}
    {{- with .values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  labels:
    {{- include "waymark.labels" . | nindent 4 }}
    {{- with .values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  serviceAccountName: {{ include "waymark.serviceAccountName" $root }}
  automountServiceAccountToken: {{ and (eq .role "ingest") $root.Values.discovery.enabled }}
  # Otherwise a Service called "waymark" would set WAYMARK_PORT to a value that is not our port.
  enableServiceLinks: false
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  # The time to drain, and then to answer the requests that have begun and to release leases.
  terminationGracePeriodSeconds: {{ add (int .values.drainSeconds) (int (default 0 .values.finishSeconds)) 20 }}
  {{- with .values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ include "waymark.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: [{{ .role }}]
      securityContext:
        {{- toYaml $root.Values.securityContext | nindent 8 }}
      ports:
        - name: http
          containerPort: 13333
          protocol: TCP
        {{- if $isPicker }}
        - name: grpc
          containerPort: 9002
          protocol: TCP
        - name: health
          containerPort: 9003
          protocol: TCP
        {{- end }}
      envFrom:
        - configMapRef:
            name: {{ $fullname }}
      env:
        - name: {{ get (dict "query" "WAYMARK_PORT" "ingest" "WAYMARK_PROBE_PORT" "gateway" "WAYMARK_PORT" "epp" "WAYMARK_PROBE_PORT") .role }}
          value: "13333"
        {{- if $isGateway }}
        - name: WAYMARK_FINISH_SECONDS
          value: {{ .values.finishSeconds | quote }}
        {{- if $hasKeys }}
        - name: WAYMARK_GATEWAY_KEYS
          value: {{ with $root.Values.config.WAYMARK_GATEWAY_KEYS }}{{ . }},{{ end }}/etc/waymark/gateway-keys/{{ .values.keysSecret.key }}
        {{- end }}
        {{- with .values.mongoSecret.name }}
        - name: WAYMARK_RESPONSES_MONGO_URL
          valueFrom:
            secretKeyRef:
              name: {{ . }}
              key: {{ $root.Values.gateway.mongoSecret.key }}
        {{- end }}
        {{- with .values.answersRedisSecret.name }}
        - name: WAYMARK_ANSWERS_REDIS_URL
          valueFrom:
            secretKeyRef:
              name: {{ . }}
              key: {{ $root.Values.gateway.answersRedisSecret.key }}
        {{- end }}
        {{- end }}
        {{- if $isPicker }}
        - name: WAYMARK_EPP_PORT
          value: "9002"
        - name: WAYMARK_EPP_HEALTH_PORT
          value: "9003"
        - name: WAYMARK_EPP_DRAIN_SECONDS
          value: {{ .values.drainSeconds | quote }}
        - name: WAYMARK_FINISH_SECONDS
          value: {{ .values.finishSeconds | quote }}
        {{- with $certificate }}
        - name: WAYMARK_EPP_TLS
          value: cert=/etc/waymark/certificate/{{ .certKey }},key=/etc/waymark/certificate/{{ .keyKey }}
        {{- end }}
        {{- end }}
        - name: WAYMARK_REDIS_URL
          valueFrom:
            secretKeyRef:
              {{- if $redis.existingSecret }}
              name: {{ $redis.existingSecret }}
              key: {{ $redis.existingSecretKeys.url }}
              {{- else }}
              name: {{ $fullname }}-redis
              key: url
              {{- end }}
        {{- if $redis.readUrl }}
        - name: WAYMARK_REDIS_READ_URL
          valueFrom:
            secretKeyRef:
              name: {{ $fullname }}-redis
              key: read-url
        {{- else if and $redis.existingSecret $redis.existingSecretKeys.readUrl }}
        - name: WAYMARK_REDIS_READ_URL
          valueFrom:
            secretKeyRef:
              name: {{ $redis.existingSecret }}
              key: {{ $redis.existingSecretKeys.readUrl }}
        {{- end }}
        {{- if $redis.passwordSecret.name }}
        - name: WAYMARK_REDIS_PASSWORD_FILE
          value: /etc/waymark/redis-password/password
        {{- end }}
        {{- if $redis.sentinelPasswordSecret.name }}
        - name: WAYMARK_REDIS_SENTINEL
          value: {{ with $root.Values.config.WAYMARK_REDIS_SENTINEL }}{{ . }},{{ end }}password_file=/etc/waymark/redis-sentinel-password/password
        {{- end }}
        {{- if $redis.tlsSecret.name }}
        {{- $tls := list }}
        {{- with $root.Values.config.WAYMARK_REDIS_TLS }}
        {{- $tls = append $tls . }}
        {{- end }}
        {{- range $label, $key := dict "ca" $redis.tlsSecret.caKey "cert" $redis.tlsSecret.certKey "key" $redis.tlsSecret.keyKey }}
        {{- if $key }}
        {{- $tls = append $tls (printf "%s=/etc/waymark/redis-tls/%s" $label $key) }}
        {{- end }}
        {{- end }}
        - name: WAYMARK_REDIS_TLS
          value: {{ join "," $tls }}
        {{- end }}
        {{- with $root.Values.apiToken.existingSecret }}
        - name: WAYMARK_API_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ . }}
              key: {{ $root.Values.apiToken.key }}
        {{- end }}
        {{- if and $apiTokens.name (or (eq .role "query") $isGateway) }}
        - name: WAYMARK_API_TOKENS_FILE
          value: /etc/waymark/api-tokens/{{ $apiTokens.key }}
        {{- end }}
        {{- with $root.Values.engineApiKey.existingSecret }}
        - name: WAYMARK_ENGINE_API_KEY
          valueFrom:
            secretKeyRef:
              name: {{ . }}
              key: {{ $root.Values.engineApiKey.key }}
        {{- with $root.Values.engineApiKey.keysKey }}
        - name: WAYMARK_ENGINE_KEYS
          valueFrom:
            secretKeyRef:
              name: {{ $root.Values.engineApiKey.existingSecret }}
              key: {{ . }}
        {{- end }}
        {{- end }}
        {{- if $engineCa.name }}
        - name: WAYMARK_ENGINE_CA_FILE
          value: /etc/waymark/engine-ca/{{ $engineCa.key }}
        {{- end }}
        {{- if and (eq .role "ingest") $root.Values.discovery.enabled }}
        - name: WAYMARK_DISCOVERY
          value: kubernetes
        - name: WAYMARK_DISCOVERY_NAMESPACE
          value: {{ $root.Values.discovery.allNamespaces | ternary "" (default $root.Release.Namespace $root.Values.discovery.namespace) | quote }}
        {{- if $root.Values.discovery.deletionCost }}
        - name: WAYMARK_DELETION_COST
          value: "on"
        {{- end }}
        {{- end }}
        {{- if $hasPublishers }}
        - name: WAYMARK_PUBLISHERS_FILE
          value: /etc/waymark/publishers/{{ $publishersKey }}
        {{- end }}
        {{- with .values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      livenessProbe:
        httpGet: {path: /health, port: http}
        {{- toYaml .values.livenessProbe | nindent 8 }}
      readinessProbe:
        httpGet: {path: /ready, port: http}
        {{- toYaml .values.readinessProbe | nindent 8 }}
      {{- if and .values.drainSeconds (not $isPicker) }}
      # The pod continues to answer until every proxy has removed it, and only then gets SIGTERM.
      lifecycle:
        preStop:
          exec:
            command: [sleep, {{ .values.drainSeconds | quote }}]
      {{- end }}
      {{- with .values.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if or $files .values.extraVolumeMounts }}
      volumeMounts:
        {{- range $files }}
        - name: {{ .name }}
          mountPath: {{ .path }}
          readOnly: true
        {{- end }}
        {{- with .values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
  {{- if or $files .values.extraVolumes }}
  volumes:
    {{- range $files }}
    - name: {{ .name }}
      {{- toYaml .source | nindent 6 }}
    {{- end }}
    {{- with .values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- with .values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if .values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- $selector := dict "matchLabels" (include "waymark.selectorLabels" . | fromYaml) }}
    {{- range .values.topologySpreadConstraints }}
    - {{- merge (dict) . (dict "labelSelector" $selector) | toYaml | nindent 6 }}
    {{- end }}
  {{- end }}
{{- end }}
