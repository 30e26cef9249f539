{{/* Name of everything in the release's namespace. */}}
{{- define "agent.fullname" -}}
{{- $name := .Release.Name | trunc 42 | trimSuffix "-" -}}
{{- if hasSuffix "agent" $name }}{{ $name }}{{ else }}{{ printf "%s-agent" $name }}{{ end -}}
{{- end }}

{{/* Name of what belongs to the whole cluster: no other release has it. */}}
{{- define "agent.clustername" -}}
{{- printf "%s-%s" .Release.Namespace (include "agent.fullname" .) -}}
{{- end }}

{{- define "agent.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "agent.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "agent.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: fedsched
{{- end }}

{{- define "agent.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end }}

{{/* The API server's version, as upstream names its images. */}}
{{- define "agent.schedulerImage" -}}
{{- $version := regexReplaceAll "^(v[0-9]+\\.[0-9]+\\.[0-9]+).*$" .Capabilities.KubeVersion.Version "${1}" -}}
{{- printf "%s:%s" .Values.scheduler.image.repository (.Values.scheduler.image.tag | default $version) -}}
{{- end }}

{{/* Where the bundle is in the pod; empty without one. */}}
{{- define "agent.bundlePath" -}}
{{- if and .Values.bundle.secret .Values.bundle.tar -}}
{{- fail "give bundle.secret or bundle.tar, not both" -}}
{{- end -}}
{{- if .Values.bundle.secret }}/etc/fedsched/bundle{{ else if .Values.bundle.tar }}/etc/fedsched/bundle/bundle.tar{{ end -}}
{{- end }}

{{- define "agent.bundleSecret" -}}
{{- .Values.bundle.secret | default (printf "%s-bundle" (include "agent.fullname" .)) -}}
{{- end }}

{{/* The agent's settings file: the user's, and on top of it what has to fit the rest of the pod. */}}
{{- define "agent.settings" -}}
{{- $own := dict "state" "/var/lib/fedsched" -}}
{{- $mode := ternary "follow" "lease" .Values.scheduler.enabled -}}
{{- $_ := set $own "election" (dict "mode" $mode "name" (include "agent.fullname" .) "namespace" .Release.Namespace) -}}
{{- $serve := dict "host" (ternary "127.0.0.1" "0.0.0.0" .Values.scheduler.enabled) "port" .Values.ports.extender -}}
{{- $_ := set $own "serve" (mergeOverwrite $serve (dict "health_host" "0.0.0.0" "health_port" .Values.ports.health)) -}}
{{- $bundle := include "agent.bundlePath" . -}}
{{- if $bundle }}{{ $_ := set $own "learn" (dict "bundle" $bundle) }}{{ end -}}
{{- range $section, $names := dict "serve" (list "host" "port" "health_host" "health_port") "learn" (list "bundle") "election" (list "mode" "name" "namespace") }}
{{- range $names }}
{{- if hasKey (get $.Values.settings $section | default dict) . }}
{{- fail (printf "settings.%s.%s is made by the chart: see its values ports, bundle and scheduler" $section .) }}
{{- end }}
{{- end }}
{{- end }}
{{- if hasKey .Values.settings "state" }}{{ fail "settings.state is made by the chart: see its value state" }}{{ end -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.settings) $own) -}}
{{- end }}

{{/* The API server's address and certificate and a token of the service account, for one container. */}}
{{- define "agent.tokenVolume" -}}
name: api
projected:
  sources:
    - serviceAccountToken: {path: token, expirationSeconds: 3607}
    - configMap:
        name: kube-root-ca.crt
        items: [{key: ca.crt, path: ca.crt}]
    - downwardAPI:
        items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]
{{- end }}

{{- define "agent.tokenMount" -}}
name: api
mountPath: /var/run/secrets/kubernetes.io/serviceaccount
readOnly: true
{{- end }}

{{- define "agent.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "agent.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* When gates are lifted at uninstallation. */}}
{{- define "agent.hook" -}}
# Before: where gates cannot be lifted, the agent stays to do it. After: pods that came meanwhile.
helm.sh/hook: pre-delete,post-delete
# A Job that failed stays, for its log; what it was granted does not.
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
